"""Our Scheduler and vLLM's, step by step: same tokens per request, same block ids, same preemptions, same results."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.side_by_side.layouts import MODEL_LAYOUTS, Group, Layout, random_layout
from tests.side_by_side.scheduler_pair import Limits, SchedulerPair, Work

NUM_SEEDS = 60
NUM_STEPS = 150


def random_limits(rng: random.Random, layout: Layout) -> Limits:
    num_drafts = rng.choice([0, 0, 1, 3])
    if any(g.num_speculative for g in layout.groups):
        num_drafts = 2
    if any(g.checkpoint_alignment for g in layout.groups):
        num_drafts = 0  # a known difference, see ledger_pair.py
    # Prefill chunks that must end at a block and leave the draft modules their tokens need room to do both.
    least = 2 * (layout.base_block_size + layout.num_draft_lookahead) if layout.enable_caching else 1
    return Limits(
        num_blocks=rng.choice([20, 40, 80]) * len(layout.groups),
        layout=layout,
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=max(rng.choice([8, 16, 32, 64]), least),
        by_priority=rng.random() < 0.3,
        long_prefill_token_threshold=0 if layout.num_draft_lookahead > 1 else rng.choice([0, 0, 5]),
        reserve_full_sequence=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        num_speculative_tokens=num_drafts,
        num_lookahead_tokens=rng.choice([0, num_drafts]),
        steps_in_flight=rng.choice([1, 1, 2]),
    )


def one_group(rng: random.Random) -> Layout:
    return Layout("full", (Group("full", rng.choice([1, 4, 4, 16])),), enable_caching=rng.random() < 0.8)


def random_work(rng: random.Random, number: int, limits: Limits, texts: list[list[int]]) -> Work:
    prompt = rng.choice(texts)[: rng.randint(1, 40)]
    if rng.random() < 0.5:
        prompt = prompt + [rng.randrange(100) for _ in range(rng.randint(1, 20))]
    # A request that cannot fit the pool at its end is vLLM's livelock; ours ends it with an error (a known difference).
    slots = (limits.num_blocks - 1) // len(limits.layout.groups) * min(limits.layout.block_sizes())
    most = min(slots, limits.max_model_len) - limits.num_speculative_tokens - limits.num_lookahead_tokens - 2
    prompt = prompt[: max(1, min(len(prompt), most - 1))]
    return Work(
        f"r{number}",
        prompt,
        max_tokens=rng.randint(1, max(1, min(40, most - len(prompt)))),
        priority=rng.randint(0, 2),
        arrival_time=float(number),
        stop_token_ids=(7,) if rng.random() < 0.3 else (),
        skips_lookup=limits.has_source and rng.random() < 0.05,
    )


def can_be_scheduled_there(layout: Layout) -> bool:
    """Encoder tokens come with multimodal inputs in vLLM, which need a real model; its states have one block size; and
    with several draft modules beside states it can stop making progress (a known difference)."""
    state_sizes = {group.block_size for group in layout.groups if group.kind == "mamba_align"}
    has_encoder = any(group.kind == "cross" for group in layout.groups)
    has_ranks = layout.context_parallel_size > 1  # its configuration asks for as many devices
    stalls = bool(state_sizes) and layout.num_draft_lookahead > 1
    return not (has_encoder or has_ranks or stalls) and len(state_sizes) <= 1


def drive(limits: Limits, directory: Path, rng: random.Random, seed: int) -> int:
    """A random life of both schedulers, to its end. How many steps it had."""
    pair = SchedulerPair(limits, str(directory), seed)
    texts = [[rng.randrange(100) for _ in range(40)] for _ in range(3)]
    number = 0
    for _ in range(NUM_STEPS):
        while rng.random() < 0.3:
            pair.add(random_work(rng, number, limits, texts))
            number += 1
        requests = pair.ours.running_requests() + pair.ours.waiting_requests()
        if requests and rng.random() < 0.05:
            pair.abort(rng.choice(requests).request_id)
        if rng.random() < 0.02:
            pair.reset(preempt_running=rng.random() < 0.5)
        pair.stir_store(0.1)
        pair.step()
    pair.drain()
    assert not pair.theirs.has_unfinished_requests()
    assert pair.ours.manager.usage == 0.0
    return pair.num_steps


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_one_group(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    drive(random_limits(rng, one_group(rng)), tmp_path, rng, seed)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_layout(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng)
    while not can_be_scheduled_there(layout):
        layout = random_layout(rng)
    drive(random_limits(rng, layout), tmp_path, rng, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "layout", [layout for layout in MODEL_LAYOUTS if can_be_scheduled_there(layout)], ids=lambda layout: layout.name
)
def test_model_layout(layout: Layout, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    drive(random_limits(rng, layout), tmp_path, rng, seed)


def with_source(rng: random.Random, layout: Layout) -> Limits:
    """Loads hold blocks, so tight pools are where they matter."""
    limits = random_limits(rng, layout)
    return replace(limits, has_source=True, by_priority=rng.random() < 0.5, steps_in_flight=rng.choice([1, 2]))


# The last one: a load arrives in part, and with it a step from before its request was preempted.
@pytest.mark.parametrize("seed", [*range(NUM_SEEDS), 100_028])
def test_one_group_with_external_tokens(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    drive(with_source(rng, one_group(rng)), tmp_path, rng, seed)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_layout_with_external_tokens(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng)
    while not can_be_scheduled_there(layout):
        layout = random_layout(rng)
    drive(with_source(rng, layout), tmp_path, rng, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "layout", [layout for layout in MODEL_LAYOUTS if can_be_scheduled_there(layout)], ids=lambda layout: layout.name
)
def test_model_layout_with_external_tokens(layout: Layout, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    drive(with_source(rng, layout), tmp_path, rng, seed)
