"""Whatever is in a file, the command that reads it ends with a result or with a message; never with a traceback.

The files are almost right, because what is far off is refused by the first look at it.
"""

import gzip
import io
import json
import os
import threading
import zlib
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.cli import main
from kvledger.errors import KVLedgerError
from kvledger.events import BlockStored, EventError, FileSink, KVEventBatch, read_events
from kvledger.files.whole import MAX_FILE_BYTES
from kvledger.models.config import MAX_LAYERS
from kvledger.models.sources import catalogue, find_in_catalogue
from kvledger.plan.command_line import parse_pasted
from kvledger.plan.counts import parse_bytes, parse_count, parse_counts, parse_length, parse_number
from kvledger.plan.gpus import find_gpu
from kvledger.replay.measured import read_measured
from kvledger.replay.step_table import fit, read_step_table
from kvledger.traces.lines import MAX_LINE_BYTES
from tests.conftest import LONG
from tests.unit.files.mangle import broken_bytes, mangled, mangled_lines
from tests.unit.replay.engines import LLAMA_WORK
from tests.unit.traces.recordings import mooncake, write
from tests.unit.traces.samples import AIPERF_TEXTS, ASKED_FOR, SAMPLES, TEXTS
from tests.unit.traces.words import tokenizer_file

SMALL_ENGINE = ["--num-blocks", "30", "--block-size", "16", "--hash", "none", "--json"]


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error. Whatever it raises fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def require_an_end(*arguments: str) -> None:
    """A result, or a message that says something."""
    code, out, err = command(*arguments)
    assert code in (0, 1, 2)
    assert out.strip() or err.strip()
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("files")


# Traces


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=12 * LONG)
@given(data=st.data())
def test_a_trace(name: str, folder: Path, data: st.DataObject) -> None:
    path = folder / f"{name}.jsonl"
    sample = AIPERF_TEXTS if name == "aiperf" and data.draw(st.booleans()) else SAMPLES[name]
    path.write_bytes(data.draw(mangled_lines(sample)))
    options = data.draw(st.sampled_from([["--skip-bad"], ["--sequential"], ["--closed-loop"], []]))
    named = ["--format", name] if name in ASKED_FOR or data.draw(st.booleans()) else []
    texts = ["--tokenizer", str(tokenizer_file(folder))] if name in TEXTS or sample is AIPERF_TEXTS else []
    if data.draw(st.booleans()):
        require_an_end("replay", str(path), *SMALL_ENGINE, *named, *options, *texts)
    else:
        require_an_end(
            "trace", str(path), "--json", *named, *[option for option in options if option == "--skip-bad"], *texts
        )


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@settings(max_examples=40 * LONG)
@given(data=st.data())
def test_a_damaged_archive(suffix: str, folder: Path, data: st.DataObject) -> None:
    path = write(folder, *SAMPLES["mooncake"], name=f"trace.jsonl{suffix}")
    Path(path).write_bytes(data.draw(broken_bytes(Path(path).read_bytes())))
    require_an_end("replay", path, *SMALL_ENGINE)


def test_a_line_without_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A small archive of one line of 50 MB."""
    path = tmp_path / "bomb.jsonl.gz"
    packer = zlib.compressobj(wbits=31)
    with path.open("wb") as file:
        for _ in range(50):
            file.write(packer.compress(b" " * 999_999 + b"1"))
        file.write(packer.flush())
    for arguments in ([], ["--skip-bad"]):
        code, _, err = command("replay", str(path), *arguments)
        assert (code, "line 1: longer than 32 MiB; expected one record a line" in err) == (1, True)


def test_a_device_without_end_is_refused(tmp_path: Path) -> None:
    code, _, err = command("replay", "/dev/zero")
    assert (code, "/dev/zero, line 1: longer than 32 MiB" in err) == (1, True)
    for arguments in (["replay", "--plan"], ["replay", "--layout"], ["plan", "--gpu", "H100", "--from-log"]):
        code, _, err = command(*arguments, "/dev/zero")
        assert (code in (1, 2), "longer than 64 MiB" in err) == (True, True)
    code, _, err = command("plan", "/dev/zero", "--gpu", "H100")
    assert (code, "longer than 64 MiB" in err) == (1, True)


@pytest.mark.parametrize("pack", [None, gzip.compress])
def test_a_pipe_is_read_like_a_file(tmp_path: Path, pack: Any) -> None:
    content = "".join(f"{line}\n" for line in SAMPLES["mooncake"]).encode()
    path = tmp_path / ("pipe.gz" if pack else "pipe")
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(pack(content) if pack else content))
    writer.start()
    code, out, _ = command("replay", str(path), *SMALL_ENGINE[2:], "--num-blocks", "200")
    writer.join()
    assert (code, json.loads(out)["num_finished"]) == (0, 3)


# What a replay is held against, and what sets its clock

STEPS = "prefill_tokens,prefill_computed,decode_requests,decode_context,milliseconds"
SCRAPE = """# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0"} 900.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 3
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 5
vllm:time_to_first_token_seconds_count{engine="0"} 5
vllm:time_to_first_token_seconds_sum{engine="0"} 0.7"""
LOG_LINE = (
    "Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs, Preemptions: 3, GPU KV cache"
)
MEASURED = {
    "scrape": SCRAPE.splitlines(),
    "log": [f"{LOG_LINE} usage: 40.0%, Prefix cache hit rate: 20.0%", "another"],
    "recording": SAMPLES["kvledger"],
}


@pytest.mark.parametrize("kind", MEASURED)
@settings(max_examples=25 * LONG)
@given(data=st.data())
def test_what_a_server_left(kind: str, folder: Path, data: st.DataObject) -> None:
    path = folder / kind
    path.write_bytes(
        data.draw(st.one_of(mangled_lines(MEASURED[kind]), broken_bytes("\n".join(MEASURED[kind]).encode())))
    )
    with suppress(KVLedgerError):
        found = read_measured(str(path))
        for latency in (found.ttft, found.itl, found.e2e):
            if latency is not None and latency.has_distribution:
                low, high = latency.range_of(0.99)
                assert low <= high


@settings(max_examples=60 * LONG)
@given(
    rows=st.lists(st.lists(st.sampled_from(["0", "1", "64", "8192", "1e30", "-1", "x", "", "0.5", "nan"]), max_size=6)),
    data=st.data(),
)
def test_a_table_of_steps(folder: Path, rows: list[list[str]], data: st.DataObject) -> None:
    path = folder / "steps.csv"
    text = "\n".join([STEPS, *map(",".join, rows)]).encode()
    path.write_bytes(data.draw(st.one_of(st.just(text), broken_bytes(text))))
    with suppress(KVLedgerError):
        model, found = fit(read_step_table(str(path)), LLAMA_WORK, find_gpu("H100"), 1)
        assert model.seconds(1, 1, 1.0) >= 0.0
        assert found.median_error <= found.largest_error


# Plans and layouts of a replay


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    """Plans as the command prints them."""
    names = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "deepseek-ai/DeepSeek-V3")
    cards = ("H100", "H100", "B200")
    options = ([], ["--tp", "4"], ["--tp", "8"])
    return {
        name: json.loads(command("plan", name, "--gpu", card, *extra, "--json")[1])
        for name, card, extra in zip(names, cards, options, strict=True)
    }


@settings(max_examples=50 * LONG)
@given(data=st.data())
def test_a_plan(folder: Path, plans: dict[str, Any], data: st.DataObject) -> None:
    plan = plans[data.draw(st.sampled_from(sorted(plans)))]
    # Only what a replay reads can break it.
    read = {name: value for name, value in plan.items() if name not in ("memory", "steps", "holding")}
    path = folder / "plan.json"
    path.write_bytes(data.draw(mangled(read)))
    trace = write(folder, mooncake(0, 40, 2, [0]))
    blocks = data.draw(st.sampled_from([["--num-blocks", "40"], ["--num-blocks", "2"]]))
    require_an_end("replay", trace, "--plan", str(path), *blocks, "--hash", "none", "--json")


LAYOUT = {
    "groups": [
        {"kind": "full", "layers": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "float16"},
        {"kind": "window", "layers": 2, "count": 3, "window": 100, "block_size": 32},
        {"kind": "chunked", "chunk": 64},
        {"kind": "mla", "head_size": 128},
        {"kind": "mla_window", "window": 20},
        {"kind": "state", "state_bytes": 1000, "cache_mode": "align"},
    ]
}


@settings(max_examples=50 * LONG)
@given(data=st.data())
def test_a_layout(folder: Path, data: st.DataObject) -> None:
    path = folder / "layout.json"
    groups = data.draw(st.lists(st.sampled_from(LAYOUT["groups"]), min_size=1, max_size=4))
    path.write_bytes(data.draw(mangled({"groups": groups})))
    trace = write(folder, mooncake(0, 40, 2, [0]))
    require_an_end("replay", trace, "--layout", str(path), "--num-blocks", "60", "--hash", "none", "--json")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"kind": "full", "count": 10**8}, "groups[0].count: expected int <= 256"),
        ({"kind": "full", "layers": 10**8}, "groups[0].layers: expected int <= 10000"),
        (
            {"kind": "full", "layers": 1000, "count": 100},
            "field layers: 100,000 in all groups, and",
        ),
        ({"kind": "full", "head_size": 10**30}, "groups[0].head_size: "),
        (
            {"kind": "full", "head_size": 2**20, "num_kv_heads": 2**20, "block_size": 2**20},
            "a block of all layers",
        ),
    ],
)
def test_a_layout_has_limits(tmp_path: Path, group: dict[str, Any], message: str) -> None:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps({"groups": [group]}))
    code, _, err = command("replay", "--layout", str(path), "--num-blocks", "100")
    assert code in (1, 2)
    assert message in " ".join(err.split())


@pytest.mark.parametrize("size", ["1e18GiB", "1000000000000000000GiB", "1e17", "1e308", "inf", "nan"])
def test_a_memory_that_no_machine_has_is_refused(size: str) -> None:
    code, _, err = command("replay", "--kv-cache-memory-bytes", size, "--limit", "1")
    assert code == 2
    assert "--kv-cache-memory-bytes" in err


# Configs

CONFIGS = [
    name
    for name in (
        "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b",
        "google/gemma-3-4b-it", "openai/whisper-large-v3", "ibm-granite/granite-4.0-h-small", "openai-community/gpt2",
    )
    if find_in_catalogue(name) is not None
]  # fmt: skip


@settings(max_examples=25 * LONG)
@given(data=st.data())
def test_a_config(folder: Path, data: st.DataObject) -> None:
    row = find_in_catalogue(data.draw(st.sampled_from(CONFIGS)))
    assert row is not None
    path = folder / "config.json"
    path.write_bytes(data.draw(mangled(row.config)))
    require_an_end("plan", str(path), "--gpu", "H100", "--tp", "2", "--json")


def test_the_configs_of_the_fuzzer_are_of_several_families() -> None:
    assert len(CONFIGS) >= 5
    assert len({row.config.get("model_type") for row in catalogue()}) > 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "not JSON"),
        (b'{"model_type": "llama", "caf\xe9": 1}', "not JSON ('utf-8' codec can't decode byte 0xe9"),
        (b"[" * 100_000, "not JSON (nested too deeply)"),
        (b'{"num_hidden_layers": 1000000000}', f"num_hidden_layers=1000000000: more than the {MAX_LAYERS:,} that are"),
        (b'{"num_hidden_layers": Infinity}', "num_hidden_layers='Infinity': not a whole number"),
        (b'{"num_hidden_layers": 1e308}', "num_hidden_layers='1e308': not a whole number"),
        (b'{"num_hidden_layers": NaN}', "num_hidden_layers='NaN': not a whole number"),
    ],
)
def test_a_config_that_cannot_be_planned_says_why(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    code, _, err = command("plan", str(path), "--gpu", "H100")
    assert code == 1
    assert message in " ".join(err.split())


# Logs, command lines, numbers, events

LOG = """INFO API server version 0.11.0
INFO config: model='meta-llama/Llama-3.1-8B', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1
INFO Model loading took 14.99 GiB and 3.1 seconds
INFO Available KV cache memory: 54.87 GiB
INFO GPU KV cache size: 449,488 tokens
INFO Maximum concurrency for 8,192 tokens per request: 54.87x
"""


@settings(max_examples=40 * LONG)
@given(data=st.data())
def test_a_log(folder: Path, data: st.DataObject) -> None:
    path = folder / "log.txt"
    text = LOG
    for _ in range(data.draw(st.integers(0, 2))):
        number = data.draw(st.sampled_from(["14.99", "54.87", "449,488", "8,192", "8192", "=1", "0.11.0", "bfloat16"]))
        text = text.replace(number, data.draw(st.sampled_from(["", "0", "9" * 30, "1.2.3", "-1", ",", "x"])))
    path.write_bytes(data.draw(st.one_of(st.just(text.encode()), broken_bytes(text.encode()))))
    require_an_end("plan", "--gpu", "H100", "--from-log", str(path), "--json")


WORDS = ["vllm", "serve", "m", "--tp", "-tp", "2", "--block-size", "=", "-", "--", "\n", "x=1", "\ud800"]


@given(st.lists(st.sampled_from(WORDS)))
def test_a_pasted_command_line(words: list[str]) -> None:
    with suppress(KVLedgerError):
        parse_pasted(words)


@given(st.text(alphabet="0123456789.,_eEkKmMgGtTiIbB+- \u0663nainf", max_size=30))
def test_a_number_of_an_option(text: str) -> None:
    for parse in (parse_count, parse_bytes, parse_length, parse_counts, parse_number):
        with suppress(KVLedgerError):
            parse("--x", text)


@pytest.mark.parametrize("name", ["events.jsonl", "events.msgpack"])
@settings(max_examples=60 * LONG)
@given(data=st.data())
def test_a_recording_of_events(name: str, folder: Path, data: st.DataObject) -> None:
    path = folder / name
    sink = FileSink(str(path))
    for seq in range(2):
        sink.send(seq, KVEventBatch(0.5, [BlockStored([1], None, [1, 2], 2, None, "GPU", None, [("salt",)], 0)]))
    sink.close()
    content = path.read_bytes()
    if name.endswith(".jsonl"):
        content = data.draw(mangled_lines(content.decode().splitlines()))
    else:
        content = data.draw(broken_bytes(content))
    path.write_bytes(content)
    with suppress(EventError):
        for _, batch in read_events(str(path)):
            assert isinstance(batch, KVEventBatch)


@settings(max_examples=30 * LONG)
@given(data=st.data())
def test_a_file_of_prompts(folder: Path, data: st.DataObject) -> None:
    path = folder / "prompts.txt"
    path.write_bytes(data.draw(broken_bytes("one\ntwo\nzwölf\n".encode())))
    require_an_end("generate", "--model", "/no/such/model", "--prompts-file", str(path))


def test_a_whole_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    code, _, err = command("replay", "--plan", str(path))
    assert (code, "longer than 64 MiB; give a smaller file" in " ".join(err.split())) == (2, True)
    assert MAX_LINE_BYTES < MAX_FILE_BYTES
