"""The report on a release of vLLM that nobody has looked at: what it makes of what the runs beside it found."""

import json
from pathlib import Path

import pytest

from kvledger.integrations.vllm import drift
from kvledger.integrations.vllm.served import nearest_release

# What two seeds found beside 0.31, cut to a few kinds (tests/side_by_side/test_drift.py has what holds of all).
SURFACE = """v1.core.kv_cache_manager:KVCacheManager.allocate_slots: 'skip_zeroing_group_ids' is gone
v1.core.sched.scheduler uses kv_cache_manager.get_zeroing_block_ids_in_range, which ours lacks
"""
FOUND = [
    {"kind": "manager: one group", "seeds": 2, "differ": 0, "not_compared": 0, "shortest": None},
    {
        "kind": "manager: qwen3-next, states in larger blocks",
        "seeds": 2,
        "differ": 2,
        "not_compared": 0,
        "shortest": {
            "seed": 0,
            "calls": 73,
            "layout": "Layout(qwen3-next)",
            "error": "cached, as (group, blocks): only here [(1, (84,)), (2, (79,)), (3, (83,))], only there []",
            "last_calls": ["start_step()", "record_prefix_lookup(r13: 0 of 16 tokens, 8)"],
        },
    },
    {"rule": "hashes_ahead", "value": False, "before": 22, "after": 29},
    {"rule": "victim_yields", "value": False, "before": 22, "after": 22},
    {"rule": "recaches_hit_states", "value": True, "before": 22, "after": 20},
]
SERVED = [
    {"layout": "gpt-oss", "problem": ""},
    {"layout": "gemma 3 with a marked draft", "problem": "seed 1, call 98: vLLM: (4, 0, 0); here: (8, 0, 0)"},
]


def answers(files: Path, *arguments: str) -> str:
    if "kvledger.integrations.vllm.surface" in arguments:
        return SURFACE
    if "tests.plugin.search" in arguments:
        return "\n".join(map(json.dumps, SERVED))
    if "tests.side_by_side.search" in arguments:
        assert arguments[-4:] == ("--as", "0.32", "--seeds", "2")
        return "some line of vLLM's\n" + "\n".join(map(json.dumps, FOUND))
    return "0.31.0\n"


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.setattr(drift, "run", answers)
    out = tmp_path / "report.md"
    assert drift.main([str(tmp_path), "--seeds", "2", "--out", str(out)]) == 0
    lines = out.read_text().splitlines()
    assert lines[0] == "# vLLM 0.31.0 beside kvledger"
    assert "Compared with the decisions of 0.32, 2 seeds a kind. The newest known: 0.33." in lines
    assert any(line.startswith("Left to vLLM's own manager: vLLM 0.31.0: known are 0.32 to 0.33") for line in lines)
    assert "- v1.core.kv_cache_manager:KVCacheManager.allocate_slots: 'skip_zeroing_group_ids' is gone" in lines
    assert "Forced, it decides as 0.32: the same in 1 of 2 kinds." in lines
    marked = "| gemma 3 with a marked draft | seed 1, call 98: vLLM: (4, 0, 0); here: (8, 0, 0) |"
    assert marked in lines
    assert "| manager: one group | 0 of 2 |  |" in lines
    assert "| manager: qwen3-next, states in larger blocks | 2 of 2 |  |" in lines
    assert "    record_prefix_lookup(r13: 0 of 16 tokens, 8)" in lines
    assert "| hashes_ahead | False | 22 -> 29 | as 0.32 |" in lines
    assert "| victim_yields | False | 22 -> 22 | not decided by these seeds |" in lines
    assert "| recaches_hit_states | True | 22 -> 20 | the other way |" in lines


def test_where_nothing_is_to_be_had_it_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLEDGER_REFERENCE", str(tmp_path))
    assert drift.main(["0.29"]) == 2
    assert "scripts/make_reference.sh 0.29 lays one" in capsys.readouterr().err
    (tmp_path / "releases/0.29/vllm").mkdir(parents=True)
    (tmp_path / "releases/0.29/vllm/__init__.py").touch()
    assert drift.main(["0.29"]) == 2
    assert "no reference: run scripts/make_reference.sh first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "start"), [("0.30", "0.32"), ("0.32.1", "0.32"), ("0.33", "0.33"), ("0.40", "0.33")]
)
def test_the_rules_to_start_from(version: str, start: str) -> None:
    assert nearest_release(version) == start
