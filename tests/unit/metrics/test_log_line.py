"""The periodic line, on a clock that the test sets."""

import re

import pytest

from kvledger.errors import ConfigError
from kvledger.metrics import IntervalLog
from kvledger.scheduler import ExternalHit
from tests.engine import Engine
from tests.helpers import other


class LoggedEngine:
    """Ten seconds between lines; every step takes as long as the test says."""

    def __init__(self, usable: int) -> None:
        self.now = 0.0
        self.engine = Engine(usable)
        self.log = IntervalLog(self.engine.scheduler, 10.0, lambda: self.now)

    def step(self, seconds: float, num_prompt_tokens: int = 0, num_generation_tokens: int = 0) -> str | None:
        self.engine.step()
        self.now += seconds
        return self.log.step(num_prompt_tokens, num_generation_tokens)


def test_a_line_comes_when_the_interval_is_over() -> None:
    logged = LoggedEngine(20)
    logged.engine.add("a", 8, max_tokens=9)
    assert logged.step(4.0, 8, 1) is None
    assert logged.step(4.0, 0, 1) is None
    assert logged.step(4.0, 0, 1) == (
        "Engine 000: Avg prompt throughput: 0.7 tokens/s, Avg generation throughput: 0.2 tokens/s, "
        "Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 15.0%, Prefix cache hit rate: 0.0%, "
        "External prefix cache hit rate: 0.0%"
    )
    assert logged.step(9.0, 0, 5) is None
    line = logged.step(1.0, 0, 5)
    assert line is not None
    assert "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 1.0 tokens/s" in line


def test_what_there_is_none_of_is_left_out() -> None:
    logged = LoggedEngine(4)
    line = logged.step(10.0)
    assert line is not None
    assert not re.search("Deferred|Preemptions|hit rate", line)
    logged.engine.add("a", other(8, 1), max_tokens=9)
    logged.engine.add("b", other(5, 2), max_tokens=9)
    logged.step(1.0, 13, 2)
    line = logged.step(9.0, 0, 1)
    assert line is not None
    assert "Running: 1 reqs, Waiting: 1 reqs, Preemptions: 1, GPU KV cache usage: 75.0%" in line


def test_loads_are_deferred_and_external_hits_have_a_rate() -> None:
    logged = LoggedEngine(20)
    logged.engine.source.offers["a"] = ExternalHit(6, asynchronous=True)
    logged.engine.add("a", 8)
    line = logged.step(10.0, 1, 0)
    assert line is not None
    assert "Waiting: 1 reqs, Deferred: 1 reqs" in line
    assert line.endswith("Prefix cache hit rate: 0.0%, External prefix cache hit rate: 75.0%")


def test_an_idle_engine_says_so_once() -> None:
    logged = LoggedEngine(8)
    lines = [logged.step(10.0) for _ in range(4)]
    assert lines[0] is not None
    assert lines[1:] == [None, None, None]
    logged.engine.add("a", 4)
    assert logged.step(10.0, 4, 1) is not None


def test_the_hit_rate_is_that_of_the_last_thousand_requests() -> None:
    logged = LoggedEngine(8)
    logged.engine.add("new", 4, max_tokens=1)
    logged.step(0.0)
    for number in range(1000):
        logged.engine.add(str(number), [0, 1, 2, 3, number + 7], max_tokens=1)
        logged.step(0.0)
    line = logged.step(10.0, 1, 1)
    assert line is not None
    # The miss of the first one is forgotten; all others found 4 of 5 tokens.
    assert "GPU KV cache usage: 0.0%, Prefix cache hit rate: 80.0%" in line


def test_an_interval_without_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"interval=0\.0: no time passes between two lines"):
        IntervalLog(Engine(8).scheduler, 0.0, lambda: 0.0)


def test_the_prompt_tokens_of_a_step_need_not_be_counted() -> None:
    """A budget of 8: the prompt of 20 takes 8, 8 and 4, then 4 tokens of the next one join its decodes."""
    now = 0.0
    engine = Engine(20, max_num_batched_tokens=8)
    log = IntervalLog(engine.scheduler, 10.0, lambda: now)
    engine.add("a", 20, max_tokens=9)
    lines = []
    for _ in range(3):
        output = engine.step()
        lines.append(log.step_output(output, len(engine.tokens["a"])))
    engine.add("b", other(4, 1), max_tokens=9)
    output = engine.step()
    now = 10.0
    lines.append(log.step_output(output, 2))
    assert lines[:3] == [None, None, None]
    assert lines[3] is not None
    assert "Avg prompt throughput: 2.4 tokens/s, Avg generation throughput: 0.3 tokens/s" in lines[3]


def test_what_is_left_at_the_end_can_be_had() -> None:
    logged = LoggedEngine(8)
    assert logged.log.flush() is None
    logged.engine.add("a", 4, max_tokens=2)
    assert logged.step(0.0, 4, 1) is None
    assert logged.log.flush() is None  # no time has passed
    assert logged.step(4.0, 0, 1) is None
    line = logged.log.flush()
    assert line is not None
    assert "Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 0.5 tokens/s, Running: 0 reqs" in line
    assert logged.log.flush() is None
