"""The OpenAI server, as a user starts it: its engine is a process of its own, and the plugin is found by itself."""

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

import kvledger
from kvledger.traces.formats import open_trace
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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def server(directory: Path, **switches: str) -> Iterator[tuple[str, Path]]:
    """Its address and its log."""
    port = free_port()
    arguments = {"--model": REFERENCE / "smollm2", "--served-model-name": "smol", "--max-model-len": 512}
    arguments |= {"--block-size": 32, "--port": port, "--host": "127.0.0.1"}
    words = [str(word) for pair in arguments.items() for word in pair]
    environment = os.environ | {
        "KVLEDGER_VLLM": "1",
        "PYTHONPATH": os.pathsep.join([str(metadata(directory)), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOG_STATS_INTERVAL": "1",
        **switches,
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
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in scrape(address) if line.startswith("vllm:")}


def scrape(address: str) -> list[str]:
    with urlopen(f"{address}/metrics") as answer:
        lines: list[str] = answer.read().decode().splitlines()
        return lines


def test_the_server_runs_on_the_ledger(tmp_path: Path) -> None:
    why, recording = f"127.0.0.1:{free_port()}", tmp_path / "traffic.jsonl.gz"
    with server(tmp_path, KVLEDGER_WHY=why, KVLEDGER_RECORD=str(recording)) as (address, log):
        prompt = "The capital of France is Paris. " * 12
        first = complete(address, prompt)
        assert complete(address, prompt) == first
        counted = metrics(address)
        complete(address, "Once upon a time")
        told = scrape(f"http://{why}")
        # Written once a second; a server that is terminated may take the last second with it.
        time.sleep(1.5)
    lines = [line for line in log.read_text().splitlines() if "keeps the KV cache of vLLM" in line]
    assert len(lines) == 1
    assert f"{kvledger.build_info()} keeps the KV cache of vLLM" in lines[0]
    # Each prompt has 84 tokens and more; the second finds whole blocks of 32 of the first.
    assert counted["vllm:prefix_cache_hits_total"] >= 64
    assert counted["vllm:prefix_cache_queries_total"] >= 2 * counted["vllm:prefix_cache_hits_total"]
    assert counted["vllm:kv_cache_usage_perc"] == 0.0
    require_why(told, log.read_text(), counted["vllm:prefix_cache_hits_total"])
    require_recording(recording)


def require_why(told: list[str], log: str, num_hit: float) -> None:
    """The engine core's own port has the ledger's series, and its log a line that sums them up."""
    labels = 'engine="0",model_name="smol"'
    assert f'kvledger:prefix_cache_tokens_total{{{labels},reason="hit"}} {num_hit}' in told
    assert f'kvledger:kv_cache_blocks{{{labels},state="live"}} 0.0' in told
    assert any(line.startswith(f'kvledger:num_requests_without_tokens{{{labels},reason="blocks"}}') for line in told)
    assert any(line.startswith("kvledger:prefix_cache_hits_total") and float(line.split()[-1]) >= 64 for line in told)
    assert "why prompts miss and requests wait: http://127.0.0.1:" in log
    assert "KV blocks: " in log
    assert " prompt tokens: never seen " in log


def require_recording(file: Path) -> None:
    """What the server wrote until it was stopped can be read."""
    with closing(open_trace(str(file))) as reader:
        first, second, third = reader.requests()
    assert first.num_prompt_tokens == second.num_prompt_tokens > 84
    assert first.hash_ids == second.hash_ids
    assert [request.num_output_tokens for request in (first, second, third)] == [6, 6, 6]
