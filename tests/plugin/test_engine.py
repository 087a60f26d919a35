"""Real engines on CPU, with and without the ledger: the same tokens, steps, block ids, events and statistics.

Each test runs vLLM twice over the same requests. A few seconds an engine; the models are SmolLM2 with its weights and
tiny hybrids with dummy ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.engine_run import EngineRun, engine_run
from tests.plugin.models import REFERENCE, dummy, smollm2

EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}

needs_smollm2 = pytest.mark.skipif(
    not (REFERENCE / "smollm2").exists(), reason="no model: scripts/make_reference.sh --model"
)


def same_with_and_without(life: Callable[[EngineRun], None], **arguments: Any) -> EngineRun:
    """Runs that life with vLLM's manager and with ours; returns the run with ours, shut down, to look at."""
    records: list[dict[str, list[Any]]] = []
    for with_ledger in (False, True):
        with engine_run(with_ledger, **arguments) as run:
            life(run)
            records.append(run.record())
    theirs, ours = records
    for what in ("steps", "events", "stats", "tokens"):
        for index, (their, our) in enumerate(zip(theirs[what], ours[what], strict=False)):
            assert their == our, f"{what}[{index}]"
        assert len(theirs[what]) == len(ours[what]), what
    assert ours["tokens"]
    return run


def everyday(run: EngineRun) -> None:
    """Prefix hits, several samples of a prompt, aborts, and a reset of the cache while idle and while busy."""
    run.generate(6, 20)
    run.generate(1, 20, n=3, temperature=0.8, seed=3)
    assert run.llm.reset_prefix_cache()
    run.generate(3, 10)
    names = run.start(5, max_tokens=20)
    run.step(5)
    run.abort(names[1])
    run.abort(names[3])
    run.step(3)
    assert not run.llm.reset_prefix_cache()
    run.step(3)
    assert run.scheduler.reset_prefix_cache(reset_running_requests=True)
    run.step(100)
    assert not run.engine.has_unfinished_requests()


def num_hit_tokens(run: EngineRun) -> int:
    return sum(sum(counts) for counts in run.tokens if counts and isinstance(counts[0], int))


@needs_smollm2
def test_everyday() -> None:
    run = same_with_and_without(everyday, **smollm2(), **EVENTS)
    assert run.events
    assert num_hit_tokens(run) > 0
    assert run.decode_steps is not None
    assert run.decode_steps.num_scheduled > len(run.steps) // 2
    assert run.decode_steps.num_returned > len(run.steps) // 2


@needs_smollm2
def test_chunked_prefill() -> None:
    run = same_with_and_without(
        lambda run: run.generate(8, 20), **smollm2(), max_num_batched_tokens=64, max_num_seqs=16
    )
    assert max(sum(step["tokens"].values()) for step in run.steps) <= 64


@needs_smollm2
def test_preemption() -> None:
    """13 blocks of 32 tokens, which eight requests outgrow together."""
    run = same_with_and_without(
        lambda run: run.generate(8, 80, longest=60), **smollm2(), **EVENTS, num_gpu_blocks_override=14, max_num_seqs=8
    )
    assert any(step["resumed"] for step in run.steps)


@needs_smollm2
@pytest.mark.parametrize("num_blocks", [None, 20])
def test_ngram_drafts(num_blocks: int | None) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    run = same_with_and_without(everyday, **smollm2(), speculative_config=drafts, num_gpu_blocks_override=num_blocks)
    assert any(step["drafts"] for step in run.steps)


@needs_smollm2
@pytest.mark.parametrize("num_blocks", [None, 20])
def test_async_scheduling(num_blocks: int | None) -> None:
    run = same_with_and_without(everyday, **smollm2(), async_scheduling=True, num_gpu_blocks_override=num_blocks)
    assert run.decode_steps is not None
    assert run.decode_steps.num_scheduled > len(run.steps) // 3


@needs_smollm2
def test_a_connector(tmp_path: Path) -> None:
    """It stores blocks in files and loads them; each run has a directory of its own."""
    records = []
    for with_ledger in (False, True):
        transfer = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / str(with_ledger))},
        }
        with engine_run(with_ledger, **smollm2(), kv_transfer_config=transfer, num_gpu_blocks_override=34) as run:
            run.generate(5, 10)
            run.generate(5, 10)
            records.append(run.record())
    assert records[0] == records[1]


@pytest.mark.parametrize("num_blocks", [None, 90])
def test_six_groups(num_blocks: int | None, tmp_path: Path) -> None:
    run = same_with_and_without(everyday, **dummy("gemma3", tmp_path), **EVENTS, num_gpu_blocks_override=num_blocks)
    assert len(run.steps[0]["new"][0][1]) == 6


def test_a_sliding_window(tmp_path: Path) -> None:
    same_with_and_without(everyday, **dummy("mistral", tmp_path), **EVENTS)


@pytest.mark.parametrize("num_blocks", [None, 24])
def test_recurrent_states(num_blocks: int | None, tmp_path: Path) -> None:
    run = same_with_and_without(
        everyday,
        **dummy("qwen3-next", tmp_path),
        **EVENTS,
        enable_prefix_caching=True,
        num_gpu_blocks_override=num_blocks,
    )
    assert any(step["zero"] for step in run.steps)


@needs_smollm2
def test_five_hundred_requests_in_a_random_mix() -> None:
    """They come and go in waves, some are aborted, and the pool is too small for all of them."""

    def life(run: EngineRun) -> None:
        names: list[str] = []
        while run._num_started < 500:
            names += run.start(run.rng.randint(1, 25), max_tokens=run.rng.randint(1, 20), longest=40)
            run.step(run.rng.randint(1, 12))
            if run.rng.random() < 0.3:
                run.abort(run.rng.choice(names))
        run.step(5000)
        assert not run.engine.has_unfinished_requests()

    run = same_with_and_without(life, **smollm2(), **EVENTS, num_gpu_blocks_override=40, max_num_seqs=32)
    assert any(step["resumed"] for step in run.steps)
