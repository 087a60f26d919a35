"""The OpenAI server, as a user starts it: its engine is a process of its own, and the plugin is found by itself."""

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

import kvledger
from tests.plugin.models import REFERENCE

ROOT = Path(__file__).parents[2]
START_SECONDS = 300

pytestmark = pytest.mark.skipif(
    not (REFERENCE / "smollm2").exists(), reason="no model: scripts/make_reference.sh --model"
)


def metadata(directory: Path) -> Path:
    """What an installed kvledger has beside its files: vLLM finds plugins by their entry points."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    info = directory / f"kvledger-{kvledger.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvledger\nVersion: {kvledger.__version__}\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    return directory


@contextmanager
def server(directory: Path) -> Iterator[tuple[str, Path]]:
    """Its address and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {"--model": REFERENCE / "smollm2", "--served-model-name": "smol", "--max-model-len": 512}
    arguments |= {"--block-size": 32, "--port": port, "--host": "127.0.0.1"}
    words = [str(word) for pair in arguments.items() for word in pair]
    environment = os.environ | {
        "KVLEDGER_VLLM": "1",
        "PYTHONPATH": os.pathsep.join([str(metadata(directory)), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *words]
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(address, process, log)
            yield address, log
        finally:
            process.terminate()
            process.wait(60)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{address}/health"):
                return
        except (URLError, ConnectionError):
            time.sleep(1)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-3000:]}")


def complete(address: str, prompt: str) -> str:
    body = {"model": "smol", "prompt": prompt, "max_tokens": 6, "temperature": 0}
    request = Request(f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def metrics(address: str) -> dict[str, float]:
    """Counters of /metrics, without their labels."""
    with urlopen(f"{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:")}


def test_the_server_runs_on_the_ledger(tmp_path: Path) -> None:
    with server(tmp_path) as (address, log):
        prompt = "The capital of France is Paris. " * 12
        first = complete(address, prompt)
        assert complete(address, prompt) == first
        counted = metrics(address)
    lines = [line for line in log.read_text().splitlines() if "keeps the KV cache of vLLM" in line]
    assert len(lines) == 1
    assert f"{kvledger.build_info()} keeps the KV cache of vLLM" in lines[0]
    # Each prompt has 84 tokens and more; the second finds whole blocks of 32 of the first.
    assert counted["vllm:prefix_cache_hits_total"] >= 64
    assert counted["vllm:prefix_cache_queries_total"] >= 2 * counted["vllm:prefix_cache_hits_total"]
    assert counted["vllm:kv_cache_usage_perc"] == 0.0
