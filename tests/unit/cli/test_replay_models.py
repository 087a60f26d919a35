"""`kvledger replay` over real models, plans and layout files, from outside."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.cli import main
from tests.unit.traces.recordings import mooncake, write

QUICK = ("--hash", "none", "--check")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command line."""
    code = main([*arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def replay(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, "replay", *arguments, "--json", *QUICK)
    assert (code, err) == (0, "")
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two conversations of three turns; each turn has the one before as its prefix."""
    lines = [
        mooncake(
            turn * 9000 + chat, prompt=turn * 1024 + 1500, output=40, ids=[chat * 100 + i for i in range(turn * 2 + 3)]
        )
        for turn in range(3)
        for chat in range(2)
    ]
    return write(tmp_path, *lines)


def planned(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> str:
    """The file that a plan was written to."""
    _, out, _ = run(capsys, "plan", *arguments, "--json")
    path = tmp_path / "plan.json"
    path.write_text(out)
    return str(path)


# Model, options, then what it must be: kinds of groups, blocks of tokens, where hits end, tokens hit. The second turn
# of a chat shares 1,500 tokens with the first and the third 2,524 with the second. States are cached where a prompt's
# last whole block ends.
MODELS = [
    ("google/gemma-3-4b-it-text-only", "--num-blocks=3000", 7, 16, 16, 2 * (1488 + 2512)),
    ("openai/gpt-oss-120b", "--num-blocks=1000", 2, 16, 16, 2 * (1488 + 2512)),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "--num-blocks=2000", 4, 16, 16, 2 * (1488 + 2512)),
    ("deepseek-ai/DeepSeek-V3", "--num-blocks=500", 1, 16, 16, 2 * (1488 + 2512)),
    ("mistralai/Ministral-8B-Instruct-2410", "--num-blocks=500", 1, 16, 16, 2 * (1488 + 2512)),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "--num-blocks=100", 4, 576, 576, 2 * (1152 + 2304)),
    ("Qwen/Qwen3.5-27B", "--num-blocks=100", 4, 832, 832, 2 * (832 + 2496)),
]


@pytest.mark.parametrize(("model", "blocks", "num_groups", "block_size", "hit_step", "num_hit"), MODELS)
def test_a_model_has_its_own_groups(
    model: str,
    blocks: str,
    num_groups: int,
    block_size: int,
    hit_step: int,
    num_hit: int,
    trace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = replay(capsys, trace, "--model", model, blocks)
    assert len(result["groups"]) == num_groups
    assert (result["block_size"], result["hit_step"]) == (block_size, hit_step)
    assert result["prefix_cache"]["num_hit_tokens"] == num_hit
    assert result["num_finished"] == 6
    assert result["model"].lower() == model.lower()


def test_a_plan_is_replayed_like_its_model(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("openai/gpt-oss-120b", "--tensor-parallel-size", "2", "--max-model-len", "4096")
    path = planned(capsys, tmp_path, *options, "--gpu", "H100", "--num-gpu-blocks-override", "900")
    by_plan = replay(capsys, trace, "--plan", path)
    by_model = replay(capsys, trace, "--model", *options, "--num-blocks", "900")
    for result in (by_plan, by_model):
        for name in [name for name in result if "wall" in name or name in ("gpu", "notes")]:
            del result[name]
    assert by_plan == by_model
    assert (by_plan["num_gpus"], by_plan["num_blocks"]) == (2, 900)


def test_a_plan_can_be_changed(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = planned(capsys, tmp_path, "openai/gpt-oss-120b", "--gpu", "H100", "--tp", "2", "--dp", "2")
    result = replay(capsys, trace, "--plan", path, "--kv-cache-memory-bytes", "295MiB", "--max-model-len", "3000")
    # A block is 18 layers x 16 tokens x 4 heads x (64 + 64) x 2 bytes on each of 2 GPUs.
    assert result["bytes_per_block"] == 294_912
    assert result["num_blocks"] == 295 * 2**20 // 294_912
    assert result["refused"] == {"prompt_exceeds_max_model_len": 2}
    assert any("one of 2 replicas" in note for note in result["notes"])


def test_a_pool_out_of_estimates_says_so(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "replay", trace, "--model", "Qwen/Qwen3.5-27B", "--tp", "2", "--json", "--hash", "none")
    result = json.loads(out)
    assert any(note.startswith(f"{result['num_blocks']:,} blocks are an estimate, ") for note in result["notes"])
    exact = replay(capsys, trace, "--model", "Qwen/Qwen3.5-27B", "--tp", "2", "--num-blocks", "100")
    assert not any("blocks are an estimate" in note for note in exact["notes"])


def test_memory_sizes_a_model(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = replay(capsys, trace, "--model", "openai/gpt-oss-120b", "--tp", "2", "--kv-cache-memory-bytes", "295MiB")
    assert result["num_blocks"] == 295 * 2**20 // 294_912
    assert "a real engine would not start with this pool" in result["notes"][-1]


def test_the_report_has_a_table_of_groups(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run(capsys, "replay", trace, "--model", "Qwen/Qwen3.5-27B", "--num-blocks", "100", *QUICK)
    assert code == 0
    for words in (
        "Qwen/Qwen3.5-27B  on 1 x NVIDIA H100 80GB HBM3 (SXM), vLLM 0.33, groups: 4, at most 262,144 tokens",
        "shorter prompts never hit",
        "hits end at multiples of",
        "prompts too short for that",
        "recurrent state",
        "16 each",
        "tokens lost",
    ):
        assert words in out


def test_a_layout_file_with_drafts_and_sparse_retention(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "layout.json"
    path.write_text('{"groups": [{"kind": "full", "layers": 8}, {"kind": "window", "layers": 8, "window": 256}]}')
    options = (trace, "--layout", str(path), "--num-blocks", "1000")
    assert replay(capsys, *options)["prefix_cache"]["num_hit_tokens"] == 2 * (1488 + 2512)
    drafts = replay(capsys, *options, "--drafts", "2", "--vllm-version", "0.32")
    assert drafts["prefix_cache"]["num_hit_tokens"] == 2 * (1472 + 2496)
    sparse = replay(capsys, *options, "--retention-interval", "0")
    assert sparse["groups"][1]["num_cached_blocks"] < drafts["groups"][1]["num_cached_blocks"] / 4
    _, out, _ = run(capsys, "replay", *options, *QUICK)
    assert "layout.json  on 4 x NVIDIA H100 80GB HBM3 (SXM), vLLM 0.33, groups: 2, at most 131,072 tokens\n" in out
    assert "1,000 x 16 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--model", "openai/whisper-large-v3"), "its cross attention keeps what an encoder made of audio"),
        (("--model", "Qwen/Qwen3-32B"), "--max-model-len"),
        (("--model", "Qwen/Qwen3-32B"), "--num-blocks or --kv-cache-memory-bytes: replayed on that pool"),
        (("--model", "Qwen/Qwen3-32B", "--tp", "7"), "must be divisible by tensor parallel size (7)"),
    ],
)
def test_a_model_that_cannot_be_replayed_ends_with_the_reason(
    arguments: tuple[str, ...], expected: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "replay", trace, *arguments)
    assert (code, out) == (1, "")
    assert expected in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "plan.json: expected object, got array; give the output of `kvledger plan"),
        ('{"model": "m"}', "plan.json, field num_blocks: missing"),
        ('{"fits": false, "error": {"kind": "k", "message": "no heads"}}', "this plan is a refusal: no heads"),
    ],
)
def test_a_file_that_is_no_plan(text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    code, _, err = run(capsys, "replay", "--plan", str(path))
    assert code == 1
    assert expected in err


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"groups": []}, "keeps no KV cache between steps (an encoder)"),
        ({"work": None}, "plan.json, field work: missing"),
    ],
)
def test_a_plan_without_groups_or_costs(
    change: dict[str, object], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(planned(capsys, tmp_path, "meta-llama/Llama-3.1-8B", "--gpu", "H100"))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    code, _, err = run(capsys, "replay", "--plan", str(path))
    assert code == 1
    assert expected in err


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"type": "Ring"}, "groups[0].spec.type='Ring': not a kind of group; use one of"),
        ({"colour": 1}, "groups[0].spec.colour: FullAttentionSpec has no such field"),
        ({"block_size": 0}, "groups[0].spec: block_size=0"),
    ],
)
def test_a_plan_with_a_strange_group(
    change: dict[str, object], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(planned(capsys, tmp_path, "meta-llama/Llama-3.1-8B", "--gpu", "H100"))
    plan = json.loads(path.read_text())
    plan["groups"][0]["spec"] |= change
    path.write_text(json.dumps(plan))
    code, _, err = run(capsys, "replay", "--plan", str(path))
    assert code == 1
    assert expected in err


def test_planned_drafts_have_layers_in_the_pool_and_keep_the_last_block_of_hits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (
        "--model",
        "zai-org/GLM-4.7-Flash",
        "--num-blocks",
        "30000",
        "--limit",
        "12",
        "--hash",
        "none",
        "--sequential",
    )
    bare = replay(capsys, *options)
    module = replay(capsys, *options, "--spec-method", "mtp", "--spec-tokens", "1")
    # One latent layer more, and the last block of every hit is computed again.
    assert module["bytes_per_block"] * 47 == bare["bytes_per_block"] * 48
    assert module["prefix_cache"]["num_hit_tokens"] < bare["prefix_cache"]["num_hit_tokens"]
    looked_up = replay(capsys, *options, "--spec-method", "ngram", "--spec-tokens", "4")
    assert looked_up["prefix_cache"]["num_hit_tokens"] == bare["prefix_cache"]["num_hit_tokens"]
