"""Replay over several groups: what each holds, who limits a hit, and names for blocks of several sizes."""

import dataclasses
import json
import random
from dataclasses import replace

import pytest

from kvledger.core.groups.decisions import LATEST_RELEASE
from kvledger.core.groups.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, MLAAttentionSpec
from kvledger.errors import ConfigError
from kvledger.replay.config import ReplayConfig
from kvledger.replay.layout import InputError, KVLayout, is_sparse
from kvledger.replay.layout_file import FIELDS, read_layout
from kvledger.replay.ledger import BlockLedger
from kvledger.replay.result import ReplayResult
from kvledger.replay.scheduled import ScheduledReplay
from kvledger.replay.sequential import BlocksInTurn, SequentialReplay
from kvledger.replay.serving import ServingByBlocks
from kvledger.scheduler import SchedulerConfig
from kvledger.traces.arrivals import RecordedArrivals
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.trace_request import TraceRequest
from tests.unit.replay.engines import LLAMA, LLAMA_WORK, steps_of

Entry = dict[str, object]
FULL: Entry = {"kind": "full"}
WINDOW: Entry = {"kind": "window", "window": 32}
STATE: Entry = {"kind": "state", "state_bytes": 1000, "block_size": 64}


def layout(*groups: Entry, block_size: int = 16) -> KVLayout:
    model = replace(LLAMA, cache=replace(LLAMA.cache, block_size=block_size))
    return read_layout(json.dumps({"groups": groups}).encode(), "file", model, LLAMA_WORK)[0]


def configuration(kv_layout: KVLayout, num_blocks: int = 200) -> ReplayConfig:
    """Steps of 64 tokens, every invariant checked after each."""
    return ReplayConfig(
        num_blocks, check=True, scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), layout=kv_layout
    )


def replay(
    kv_layout: KVLayout,
    *prompts: tuple[int, list[int]],
    num_blocks: int = 200,
    hash_name: str = "none",
    scheduled: bool = False,
    decisions: str = LATEST_RELEASE,
) -> ReplayResult:
    """Prompts of (tokens, ids) in trace blocks of 16 and answers of 20 tokens, one a second where time passes."""
    config = dataclasses.replace(configuration(kv_layout, num_blocks), decisions=decisions)
    requests = [TraceRequest(float(i), tokens, 20, ids, 16) for i, (tokens, ids) in enumerate(prompts)]
    arrivals = RecordedArrivals(iter(requests))
    maker = make_prompt_maker(hash_name, config.hash_block_size)
    if scheduled:
        serving = ServingByBlocks(config, maker)
        return ScheduledReplay(arrivals, serving, config, steps_of(0.05)).run(lambda done, arrived: None)
    server = BlocksInTurn(config, BlockLedger(config, maker))
    return SequentialReplay(arrivals, server, config).run(lambda done, arrived: None)


def ids(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


# What each group holds


def test_a_window_holds_its_blocks_and_null_entries_for_the_rest() -> None:
    # 160 tokens in steps of 64, 64 and 32. Before the last step token 128 sees tokens 97 to 128: blocks 0 to 5 (96
    # tokens) are given back, so of 10 entries 4 hold a block.
    result = replay(layout(FULL, WINDOW), (160, ids(10)))
    full, window = result.groups
    assert (full.held_blocks.peak, full.null_entries) == (10, 0.0)
    assert (window.held_blocks.peak, window.null_entries) == (4, 6.0)
    assert (full.kind, window.kind) == ("full attention", "sliding window of 32")


def test_a_state_is_one_block_whatever_the_length() -> None:
    # 256 tokens have 4 entries in blocks of 64, and the running state is in the last.
    state = replay(layout(FULL, STATE), (256, ids(16))).groups[1]
    assert (state.block_size, state.held_blocks.peak, state.null_entries) == (64, 1, 3.0)


def test_states_that_end_inside_blocks_count_as_evicted_once() -> None:
    # Nothing is evicted from a pool of 200 blocks; a pool of 20 has room for one prompt of 17 and a few states.
    prompts = [(256, ids(16)), (250, ids(16)), (256, ids(16, 50)), (200, ids(13))]
    assert replay(layout(FULL, STATE), *prompts).prefix_cache.num_evictions == 0
    small = replay(layout(FULL, STATE), *prompts, num_blocks=20).prefix_cache
    assert small.num_evictions > 16


def test_a_long_prompt_needs_no_more_of_a_window_than_a_step() -> None:
    # 400 tokens: 25 full blocks, and of the window 31 settled tokens and a step of 64, in any position: 6 + 1.
    prompts = [(400, ids(25))]
    assert replay(layout(FULL, WINDOW), *prompts, num_blocks=33).num_finished == 1
    assert replay(layout(FULL, WINDOW), *prompts, num_blocks=32).refused == {"prompt_exceeds_pool": 1}


def test_many_requests_leave_few_samples() -> None:
    result = replay(layout(FULL, WINDOW), *[(32, ids(2, start=i)) for i in range(300)])
    assert result.groups[0].held_blocks.peak == result.groups[0].held_blocks.mean == 2


# Hits


def test_hits_end_where_all_block_sizes_meet() -> None:
    # Blocks of 16 and 48: 150 tokens again hit 144; 47 never hit.
    mixed = layout(FULL, {**FULL, "block_size": 48, "num_kv_heads": 1})
    result = replay(mixed, (150, ids(10)), (150, ids(10)), (47, ids(3)))
    assert (result.hit_step, result.hash_block_size, result.block_size) == (48, 16, 16)
    assert result.prefix_cache.num_hit_tokens == 144
    assert result.num_short_prompts == 1


def test_prompts_shorter_than_a_states_block_never_hit() -> None:
    state = layout({**FULL, "block_size": 64}, STATE)
    result = replay(state, (64, ids(4)), (64, ids(4)), (65, ids(5)), (65, ids(5)))
    assert result.num_short_prompts == 2
    # The fourth finds what the first and the third left: 64 of 65 tokens; so does the third.
    assert result.prefix_cache.num_hit_tokens == 128


def test_the_group_that_has_less_than_the_others_limits_the_hit() -> None:
    # 7 blocks: the first prompt leaves 2 blocks cached of each group and the second takes 3 + 3, so what is left of the
    # first cannot be all. Whoever is short, every lookup but a full hit has one limiting group.
    result = replay(layout(FULL, WINDOW), (33, ids(3)), (48, ids(3, 50)), (33, ids(3)), num_blocks=8)
    assert sum(group.num_limited_hits for group in result.groups) == 3
    assert result.prefix_cache.num_hit_tokens == 0


def test_tokens_are_lost_to_a_window_whose_tail_is_gone() -> None:
    # A prompt of 10 blocks; then one that shares 5 of them. Sparse retention keeps the window's blocks only at the end
    # of the first, so the second finds 80 tokens in the full group and none in the window.
    sparse = replace(layout(FULL, WINDOW), retention_interval=0)
    result = replay(sparse, (161, ids(11)), (161, [*ids(5), *ids(6, 50)]))
    full, window = result.groups
    assert (window.num_limited_hits, window.num_lost_tokens) == (1, 80)
    assert (full.num_limited_hits, full.num_lost_tokens) == (1, 0)
    assert result.prefix_cache.num_hit_tokens == 0
    dense = replay(layout(FULL, WINDOW), (161, ids(11)), (161, [*ids(5), *ids(6, 50)]))
    assert dense.prefix_cache.num_hit_tokens == 80


def test_a_draft_gives_up_the_last_block_of_a_hit_or_hashes_ahead() -> None:
    plain = layout(FULL, WINDOW)
    prompts = [(100, ids(7)), (100, ids(7))]
    assert replay(plain, *prompts).prefix_cache.num_hit_tokens == 96
    assert replay(plain.with_drafts(3), *prompts, decisions="0.32").prefix_cache.num_hit_tokens == 80
    assert replay(plain.with_drafts(3), *prompts).prefix_cache.num_hit_tokens == 96


def test_a_draft_takes_a_state_for_each_of_its_tokens() -> None:
    drafted = layout(FULL, STATE).with_drafts(3)
    spec = drafted.groups[1].spec
    assert isinstance(spec, MambaSpec)
    assert spec.num_speculative_blocks == 3


LAYOUTS = {
    "window": layout(FULL, WINDOW),
    "sizes": layout(FULL, {**WINDOW, "block_size": 48}, {**FULL, "block_size": 24, "num_kv_heads": 2}),
    "states": layout({**FULL, "block_size": 64}, {**STATE, "count": 2}),
    "fine": layout(FULL, STATE),
    "latent": layout({"kind": "mla"}, {"kind": "mla_window", "window": 40}, block_size=32),
    "chunks": layout(FULL, {"kind": "chunked", "chunk": 64}).with_drafts(1),
    "drafts": layout(FULL, WINDOW, STATE).with_drafts(2),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_names_and_hashes_make_the_same_hits_in_every_layout(name: str, scheduled: bool) -> None:
    source = random.Random(7)
    prompts = []
    for serial in range(25):
        path = [*ids(source.randrange(0, 12)), *ids(source.randrange(1, 6), 100 * (serial % 4 + 1))]
        prompts.append((len(path) * 16 - source.randrange(0, 15), path))
    one, other = (
        replay(LAYOUTS[name], *prompts, num_blocks=70, hash_name=hash_name, scheduled=scheduled)
        for hash_name in ("none", "sha256")
    )
    assert one.prefix_cache == other.prefix_cache
    assert one.groups == other.groups
    assert one.num_finished == other.num_finished == 25
    assert one.prefix_cache.num_hit_tokens > 0


# Layout files


def test_every_kind_of_group_and_what_it_costs() -> None:
    text = json.dumps(
        {
            "groups": [
                {"kind": "full", "layers": 2, "num_kv_heads": 4, "head_size": 64, "dtype": "fp8"},
                {"kind": "window", "window": 128, "layers": 2, "count": 3},
                {"kind": "chunked", "chunk": 8192, "block_size": 32},
                {"kind": "mla"},
                {"kind": "mla_window", "window": 64, "head_size": 128},
                {"kind": "state", "state_bytes": 5000, "layers": 4, "cache_mode": "none"},
            ]
        }
    ).encode()
    made, work = read_layout(text, "file", LLAMA, LLAMA_WORK)
    full, first, _, third, chunked, latent, _, state = (group.spec for group in made.groups)
    assert full == FullAttentionSpec(16, 4, 64, dtype="fp8")
    assert first == third
    assert isinstance(chunked, ChunkedLocalAttentionSpec)
    assert chunked.block_size == 32
    assert latent == MLAAttentionSpec(16, 576)
    assert isinstance(state, MambaSpec)
    assert (state.content_bytes, state.mamba_cache_mode) == (5000, "none")
    # 2 layers x 8 heads x 16 tokens x (128 + 128) x 2 bytes; one chunked layer with blocks twice as large has as much.
    assert made.group_bytes[1] == made.group_bytes[4] == made.bytes_per_block == 131_072
    assert made.group_bytes[0] == 2 * 4 * 16 * 128
    # 32 query heads, 4 x heads x size a pair: 6 windowed layers.
    assert (work.attention[1].window, work.attention[1].flops_per_pair) == (128, 6 * 4 * 32 * 128)
    assert (work.attention[1].bytes_per_token, work.state_bytes) == (6 * 4096, 20_000)
    assert work.weight_bytes == LLAMA_WORK.weight_bytes


def test_ranks_share_heads_and_states_and_each_keeps_latents_whole() -> None:
    # 8 heads over 4 ranks, 2 heads over 4 ranks (a copy each), 5000 bytes over 4; 16 tokens x 2 bytes x 576 values.
    text = json.dumps(
        {
            "groups": [
                {"kind": "full"},
                {"kind": "full", "num_kv_heads": 2},
                {"kind": "mla"},
                {"kind": "state", "state_bytes": 5000},
            ]
        }
    ).encode()
    model = replace(LLAMA, cache=replace(LLAMA.cache, tensor_parallel_size=4))
    made, work = read_layout(text, "file", model, LLAMA_WORK)
    assert made.group_bytes == (16 * 2 * 2 * 128 * 2, 16 * 1 * 2 * 128 * 2, 16 * 576 * 2, 1250)
    # Over all ranks: 8 heads, 4 copies of one, 4 whole latents.
    assert [part.bytes_per_token for part in work.attention] == [8 * 512, 4 * 512, 4 * 1152]
    assert work.state_bytes == 5000


def test_a_model_without_plain_attention_leaves_its_heads_to_the_file() -> None:
    latent = replace(LLAMA, num_kv_heads=0, head_size=0)
    with pytest.raises(InputError, match=r"groups\[0\].num_kv_heads: missing, and the model has no plain attention"):
        read_layout(b'{"groups": [{"kind": "full"}]}', "file", latent, LLAMA_WORK)
    read_layout(b'{"groups": [{"kind": "full", "num_kv_heads": 2, "head_size": 64}]}', "file", latent, LLAMA_WORK)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "file: not a record"),
        ('{"groups": []}', "field groups: expected array of length >= 1"),
        ('{"groups": [{}]}', "field groups[0].kind: missing"),
        ('{"groups": [{"kind": "cross"}]}', "groups[0].kind: 'cross' is not a kind of group; use one of full, window"),
        ('{"groups": [{"kind": "window"}]}', "groups[0].window: missing; kind window needs it"),
        (
            '{"groups": [{"kind": "full", "window": 5}]}',
            "groups[0].window: not a field of kind full, which takes num",
        ),
        ('{"groups": [{"kind": "full", "layers": 0}]}', "groups[0].layers: expected int >= 1"),
        ('{"groups": [{"kind": "full", "dtype": "int3"}]}', "groups[0]: dtype='int3': not a KV cache element type"),
        ('{"groups": [{"kind": "state", "state_bytes": 1, "cache_mode": "all"}]}', "not a caching mode"),
        ('{"groups": [{"kind": "full", "colour": 1}]}', "colour"),
    ],
)
def test_a_wrong_layout_says_where(text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        read_layout(text.encode(), "file", LLAMA, LLAMA_WORK)
    assert message in str(raised.value)


def test_every_kind_is_in_the_table_of_fields() -> None:
    for kind in FIELDS:
        entry: Entry = {"kind": kind, "window": 9} if "window" in kind else {"kind": kind}
        entry |= {"chunked": {"chunk": 9}, "state": {"state_bytes": 9}}.get(kind, {})
        assert is_sparse(layout(entry).groups[0].spec) == (kind not in ("full", "mla"))


def test_retention_without_windows_or_states_is_refused() -> None:
    with pytest.raises(ConfigError, match="retention_interval=0: no group keeps windows or states"):
        replace(layout(FULL), retention_interval=0)
