"""Why requests waited in a replay, and its log line, on a clock where every step takes one second."""

import io

import pytest
from rich.console import Console

from kvledger.replay.config import ReplayConfig
from kvledger.replay.log import ReplayLog
from kvledger.replay.report import print_report
from kvledger.replay.result import WaitTime
from kvledger.replay.scheduled import ScheduledReplay
from kvledger.replay.serving import ServingByBlocks
from kvledger.scheduler import SchedulerConfig, WaitReason
from kvledger.traces.arrivals import RecordedArrivals
from kvledger.traces.prompts import make_prompt_maker
from tests.unit.replay.engines import ONE_SECOND, one_group
from tests.unit.replay.test_scheduled import recorded, replay


def waits(times: list[WaitTime]) -> dict[str, tuple[float, int]]:
    return {time.reason: (time.request_seconds, time.request_steps) for time in times}


def test_nobody_waits() -> None:
    assert replay(recorded(0.0, 40, 4)).why_waited == []


def test_the_budget_and_then_the_seats() -> None:
    requests = [recorded(0.0, 40, 3), recorded(0.0, 40, 3), recorded(0.0, 10, 1)]
    result = replay(*requests, scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64))
    # Step 1 computes 40 and 24 tokens and has spent its budget; in steps 2 and 3 two run, and both would have to end:
    # the first does in step 3, so that the third request starts in step 4.
    assert waits(result.why_waited) == {"max_num_seqs": (2.0, 2), "token_budget": (1.0, 1)}
    assert [time.words for time in result.why_waited] == ["max_num_seqs reached", "token budget spent"]


def test_blocks_and_those_behind() -> None:
    # 9 usable blocks: the first takes 4, the second would need 6, and the third waits behind it.
    requests = [recorded(0.0, 60, 5), recorded(0.0, 90, 1), recorded(0.0, 10, 1)]
    result = replay(*requests, num_blocks=10, scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256))
    assert waits(result.why_waited) == {"blocks": (5.0, 5), "behind": (5.0, 5)}


def test_who_is_not_handed_over_yet_waits_at_the_end_of_the_queue() -> None:
    # One seat: the scheduler is handed one request ahead, and two more have arrived.
    requests = [recorded(0.0, 10, 2) for _ in range(4)]
    result = replay(*requests, scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64))
    # Of two steps each: 3, 2 and 1 others wait.
    assert waits(result.why_waited) == {"max_num_seqs": (12.0, 12)}


def test_a_small_share_is_shown_with_as_many_decimals_as_in_the_table_of_misses() -> None:
    result = replay(recorded(0.0, 10, 1))
    result.why_waited = [
        WaitTime("token_budget", "token budget spent", 42_645.0, 70_000),
        WaitTime("blocks", "not enough free blocks", 11.0, 300),
    ]
    out = io.StringIO()
    print_report(result, Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert next(line.split()[-3:] for line in lines if "token budget" in line) == ["42,645.0", "99.97%", "70,000"]
    assert next(line.split()[-3:] for line in lines if "free blocks" in line) == ["11.0", "0.03%", "300"]


def test_log_lines_on_the_simulated_clock() -> None:
    config = ReplayConfig(101, one_group(), scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64))
    lines: list[str] = []
    requests = [recorded(0.0, 40, 4), recorded(0.0, 40, 2), recorded(0.0, 40, 2)]
    maker = make_prompt_maker("none", 16)
    log = ReplayLog(4.0, lines.append)
    driver = ScheduledReplay(RecordedArrivals(iter(requests)), ServingByBlocks(config, maker), config, ONE_SECOND, log)
    driver.run(lambda done, arrived: None)
    # In four seconds one prompt of 40 tokens and four tokens; then two of each.
    assert lines == [
        "      4.0 s  Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 1.0 tokens/s, "
        "Running: 1 reqs, Waiting: 2 reqs, GPU KV cache usage: 3.0%, Prefix cache hit rate: 0.0%",
        "      8.0 s  Engine 000: Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 1.0 tokens/s, "
        "Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.0%, Prefix cache hit rate: 0.0%",
    ]


def test_the_last_interval_is_logged_though_it_is_not_over() -> None:
    config = ReplayConfig(101, one_group(), scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64))
    lines: list[str] = []
    requests = RecordedArrivals(iter([recorded(0.0, 40, 6)]))
    log = ReplayLog(4.0, lines.append)
    maker = make_prompt_maker("none", 16)
    ScheduledReplay(requests, ServingByBlocks(config, maker), config, ONE_SECOND, log).run(lambda done, arrived: None)
    # The prompt and four tokens in four seconds, then two tokens in two.
    assert [line[:11] for line in lines] == ["      4.0 s", "      6.0 s"]
    assert "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 1 reqs" in lines[0]
    assert "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 0 reqs" in lines[1]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_number_is_cut_off_in_a_narrow_output(width: int) -> None:
    result = replay(recorded(0.0, 40, 3))
    result.why_waited = [WaitTime(reason.name, reason.value, 123_456.7, 1_234_567) for reason in WaitReason]
    console = Console(file=io.StringIO(), width=width)
    print_report(result, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("123,456.7") == text.count("1,234,567") == len(WaitReason)
    assert all(word in text for word in ("request-seconds", "share", "request-steps"))
