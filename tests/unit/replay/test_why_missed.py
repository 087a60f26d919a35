"""Why prompts missed, in the replay's result and in words. Blocks of 16 tokens."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from kvledger import MissConfig
from kvledger.replay.config import ReplayConfig
from kvledger.replay.ledger import BlockLedger
from kvledger.replay.report import larger_pools, missed_tables
from kvledger.replay.result import ReplayResult
from kvledger.replay.scheduled import ScheduledReplay
from kvledger.replay.sequential import BlocksInTurn, SequentialReplay
from kvledger.replay.serving import ServingByBlocks
from kvledger.replay.why_missed import MoreBlocks, WhyMissed
from kvledger.traces.arrivals import RecordedArrivals
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.trace_request import TraceRequest
from tests.unit.replay.engines import one_group, steps_of

FAMILIES = ((33, [1, 2, 3]), (49, [4, 5, 6, 7]), (33, [1, 2, 3]))


def replay(
    *prompts: tuple[int, list[int]], num_blocks: int = 100, remembered: int = 1000, caching: bool = True
) -> ReplayResult:
    requests = [TraceRequest(0.0, tokens, 4, ids, 16) for tokens, ids in prompts]
    config = ReplayConfig(
        num_blocks,
        one_group(),
        check=True,
        enable_caching=caching,
        explain_misses=MissConfig(max_evicted_blocks=remembered),
    )
    maker = make_prompt_maker("none", 16)
    server = BlocksInTurn(config, BlockLedger(config, maker))
    return SequentialReplay(RecordedArrivals(iter(requests)), server, config).run(lambda done, arrived: None)


def why(*prompts: tuple[int, list[int]], **options: int) -> WhyMissed:
    found = replay(*prompts, **options).why_missed
    assert found is not None
    assert sum(found.tokens.values()) == found.num_tokens == sum(tokens for tokens, _ in prompts)
    return found


def printed(found: WhyMissed, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(missed_tables(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_parts_of_all_prompts() -> None:
    found = why((40, [1, 2, 3]), (40, [1, 2, 3]), (32, [1, 2]))
    parts = {name: number for name, number in found.tokens.items() if number}
    assert parts == {"hit": 48, "never_seen": 32, "shorter_than_block": 16, "last_token_rule": 16}
    assert (found.num_requests, sum(found.resumed_tokens.values())) == (3, 0)
    assert found.summary == "42.9% of the prompt tokens were hit: 50.0% of the rest was never seen before."


def test_a_larger_pool_and_what_it_keeps() -> None:
    # Four usable blocks: the second prompt takes all, so the two cached ones of the first go, the later one first.
    found = why(*FAMILIES, num_blocks=5)
    assert found.tokens["evicted"] == 32
    assert found.more_blocks == [MoreBlocks(1, 16, 16 / 115), MoreBlocks(2, 32, 32 / 115)]
    for point in found.more_blocks:
        larger = why(*FAMILIES, num_blocks=5 + point.num_blocks)
        assert larger.tokens["hit"] == point.num_tokens
    text = printed(found)
    assert "1 more blocks" in text
    assert "2 more blocks" in text


def test_the_table_has_a_line_where_a_share_is_reached() -> None:
    found = why(*FAMILIES, num_blocks=5)
    assert larger_pools(found) == found.more_blocks
    found.more_blocks.append(MoreBlocks(4, 32, 32 / 115))
    assert larger_pools(found) == found.more_blocks[:2]


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        (
            ((5, [1]), (9, [1])),
            {},
            "No prompt token was hit: everything lies behind the last place where a hit can end",
        ),
        (((33, [1, 2, 3]), (33, [4, 5, 6])), {}, "No prompt token was hit: 97.0% of all was never seen before."),
        (((16, [1]), (16, [1])), {}, "No prompt token was hit: everything is the last block of a prompt that ends"),
        (((33, [1, 2, 3]),), {"caching": False}, "No prompt token was hit: everything was not looked up"),
        (FAMILIES, {"num_blocks": 5, "remembered": 1}, "was never seen before"),
    ],
)
def test_a_hit_rate_of_zero_explains_itself(
    prompts: tuple[tuple[int, list[int]], ...], options: dict[str, int], sentence: str
) -> None:
    found = why(*prompts, **options)
    assert found.tokens["hit"] == 0
    assert sentence in found.summary


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("other_salt", "everything is cached under another cache salt."),
        ("other_adapter", "everything is cached under another adapter."),
        ("other_epoch", "everything is cached from before the weights changed."),
        ("other_content", "everything is cached with other images or audio in the same places."),
        ("limited_by_group", "everything was cached by other groups and not by group 1."),
        ("draft_rule", "everything was cached, and is computed again because the draft model needs it."),
        ("reset", "everything was cached before the prefix cache was reset."),
        ("evicted_by_call", "everything was cached and taken back by evict_blocks."),
        ("promoted", "everything was cached in a block that answers for a longer prefix now."),
    ],
)
def test_every_cause_has_its_words(part: str, sentence: str) -> None:
    from kvledger.replay.why_missed import summary

    found = why((33, [1, 2, 3]))
    found.tokens = {**dict.fromkeys(found.tokens, 0), part: 33}
    found.limited_by_group = [0, 33]
    assert summary(found, 16) == f"No prompt token was hit: {sentence}"


def test_evicted_says_what_would_help() -> None:
    prompts = (*FAMILIES, (49, [4, 5, 6, 7]), (33, [1, 2, 3]))
    found = why(*prompts, num_blocks=5)
    assert "was cached and evicted before it came again; " in found.summary
    assert "more blocks would have kept" in found.summary


def test_what_is_forgotten_is_said() -> None:
    many = [(49, [4 * family, 4 * family + 1, 4 * family + 2, 4 * family + 3]) for family in range(8)]
    found = why(*many, num_blocks=5, remembered=1)
    assert found.num_forgotten_evictions > 0
    assert "was never seen before, or evicted more than 1 evictions ago" in found.summary
    assert "--remember-evictions" in printed(found)


def test_not_asked_not_answered() -> None:
    config = ReplayConfig(100, one_group())
    arrivals = RecordedArrivals(iter([TraceRequest(0.0, 40, 4, [1, 2, 3], 16)]))
    server = BlocksInTurn(config, BlockLedger(config, make_prompt_maker("none", 16)))
    result = SequentialReplay(arrivals, server, config).run(lambda done, arrived: None)
    assert result.why_missed is None


def test_the_scheduler_counts_resumed_requests_apart() -> None:
    requests = [TraceRequest(0.0, 33, 60, [3 * n, 3 * n + 1, 3 * n + 2], 16) for n in range(3)]
    config = ReplayConfig(11, one_group(), check=True, explain_misses=MissConfig())
    serving = ServingByBlocks(config, make_prompt_maker("none", 16))
    replayed = ScheduledReplay(RecordedArrivals(iter(requests)), serving, config, steps_of(0.002))
    nothing: Callable[[int, int], None] = lambda done, arrived: None  # noqa: E731
    result = replayed.run(nothing)
    assert result.num_preemptions > 0
    assert result.why_missed is not None
    assert result.why_missed.num_tokens == result.prefix_cache.num_query_tokens == 99
    assert sum(result.why_missed.resumed_tokens.values()) > 33


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut_off_in_a_narrow_output(width: int) -> None:
    found = why(*FAMILIES, num_blocks=5)
    text = printed(found, width)
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    head = next(line for line in text.splitlines() if "Why did it miss" in line)
    assert ("A larger pool" in head) == (width == 120)
