"""Single requests: their times, what they hit, how they ended, and which of them kept what was promised."""

import csv
from pathlib import Path

import pytest

from kvledger.errors import ConfigError
from kvledger.replay.config import ReplayConfig
from kvledger.replay.ledger import BlockLedger
from kvledger.replay.records import ReplayListener, RequestRecord, StepRecord
from kvledger.replay.request_log import COLUMNS, RequestLog
from kvledger.replay.result import ReplayResult
from kvledger.replay.scheduled import ScheduledReplay
from kvledger.replay.sequential import BlocksInTurn, SequentialReplay
from kvledger.replay.serving import ServingByBlocks
from kvledger.replay.slo import Slo, parse_slo
from kvledger.scheduler import SchedulerConfig
from kvledger.traces.arrivals import RecordedArrivals
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.trace_request import TraceRequest
from tests.unit.replay.engines import ONE_SECOND, one_group


class Heard(ReplayListener):
    hears_steps = True

    def __init__(self) -> None:
        self.requests: dict[int, RequestRecord] = {}
        self.steps: list[StepRecord] = []

    def ended(self, record: RequestRecord) -> None:
        self.requests[record.number] = record

    def stepped(self, record: StepRecord) -> None:
        self.steps.append(record)


def request(arrival: float, num_prompt: int, num_output: int, *ids: int) -> TraceRequest:
    """In blocks of 4 tokens."""
    return TraceRequest(arrival, num_prompt, num_output, list(ids), 4)


def replay(
    requests: list[TraceRequest],
    num_blocks: int = 40,
    slo: Slo | None = None,
    budget: int = 100,
    longest: int | None = None,
) -> tuple[Heard, ReplayResult]:
    """Every step takes a second."""
    config = ReplayConfig(num_blocks, one_group(4), longest, scheduler=SchedulerConfig(6, budget), slo=slo, check=True)
    heard = Heard()
    serving = ServingByBlocks(config, make_prompt_maker("none", 4))
    driver = ScheduledReplay(RecordedArrivals(iter(requests)), serving, config, ONE_SECOND, None, [heard])
    return heard, driver.run(lambda done, arrived: None)


def test_times_of_a_request() -> None:
    """A prompt of 8 tokens at 6 a step: two steps to the first token, three more to the fourth."""
    heard, result = replay([request(2.5, 8, 4)], budget=6)
    record = heard.requests[0]
    assert (record.arrival, record.admitted, record.first_token, record.end) == (2.5, 2.5, 4.5, 7.5)
    assert (record.ttft, record.itl, record.e2e) == (2.0, 1.0, 5.0)
    assert [(step.start, step.num_tokens, step.num_prefill_tokens) for step in heard.steps] == [
        (2.5, 6, 6), (3.5, 2, 2), (4.5, 1, 0), (5.5, 1, 0), (6.5, 1, 0)
    ]  # fmt: skip
    assert result.e2e_seconds is not None
    assert result.e2e_seconds.max == 5.0
    assert result.throughput is not None
    assert result.throughput.output_tokens_per_second == 4 / 7.5


def test_a_hit_is_what_the_first_admission_found() -> None:
    heard, _ = replay([request(0, 9, 1, 1, 2), request(5, 10, 1, 1, 2)])
    assert [heard.requests[number].num_hit_tokens for number in (0, 1)] == [0, 8]


def test_a_preempted_request_is_away_until_it_comes_back() -> None:
    """8 blocks of 4 tokens: two prompts of 12 take 6; both answers need a third and fourth block, and one has to go."""
    heard, result = replay([request(0, 12, 12), request(0, 12, 12)], num_blocks=9)
    assert result.num_preemptions == 1
    stayed, left = heard.requests[0], heard.requests[1]
    assert stayed.away == []
    ((start, back),) = left.away
    assert left.first_token is not None
    assert left.first_token < start < back < left.end
    assert back == stayed.end
    assert sum(step.num_preempted for step in heard.steps) == 1


def test_how_requests_end() -> None:
    requests = [request(0, 4, 90), request(0, 17, 1), request(0, 4, 2)]
    heard, result = replay(requests, longest=16)
    outcomes = [heard.requests[number].outcome for number in range(3)]
    assert outcomes == ["cut_at_max_model_len", "prompt_exceeds_max_model_len", "finished"]
    assert heard.requests[1].e2e is None
    assert (result.num_finished, result.num_cut_short, result.num_refused) == (2, 1, 1)


def test_goodput_counts_who_kept_all_limits() -> None:
    """One request a step apart: the first has its token after 1 s; the second arrives in the middle and takes 1.5 s."""
    requests = [request(0, 4, 3), request(0.5, 4, 1), request(0.5, 400, 1)]
    _, result = replay(requests, slo=Slo(ttft=1.2))
    assert result.goodput is not None
    # The prompt that is larger than the pool counts as not served.
    assert (result.goodput.num_good, result.goodput.share, result.goodput.missed) == (1, 1 / 3, {"ttft": 1})
    assert result.goodput.requests_per_second == 1 / 3
    _, result = replay(requests, slo=Slo(ttft=1.5, itl=0.9, e2e=1.0))
    assert result.goodput is not None
    assert (result.goodput.num_good, result.goodput.missed) == (0, {"ttft": 0, "itl": 1, "e2e": 2})


def test_in_sequence_there_are_hits_and_no_times() -> None:
    heard = Heard()
    config = ReplayConfig(40, one_group(4))
    arrivals = RecordedArrivals(iter([request(0, 9, 5, 1, 2), request(5, 10, 5, 1, 2), request(6, 400, 1)]))
    server = BlocksInTurn(config, BlockLedger(config, make_prompt_maker("none", 4)))
    result = SequentialReplay(arrivals, server, config, [heard]).run(lambda done, arrived: None)
    records = heard.requests
    assert [(records[number].num_hit_tokens, records[number].outcome) for number in range(3)] == [
        (0, "finished"), (8, "finished"), (0, "prompt_exceeds_pool")
    ]  # fmt: skip
    assert (records[1].ttft, records[1].itl) == (None, None)
    assert (result.e2e_seconds, result.throughput, result.goodput) == (None, None, None)


def test_a_limit_has_a_unit() -> None:
    assert parse_slo("ttft=500ms, itl=50000us,e2e=1.5s") == Slo(0.5, 0.05, 1.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=5", "'5' is no time with its unit"),
        ("ttft=0s", "'0s' is no time"),
        ("ttft=1e400s", "is no time"),
        ("tpot=5ms", "'tpot' is none of ttft, itl, e2e"),
        ("ttft=5ms,ttft=6ms", "ttft is there twice"),
        ("", "'' is none of"),
    ],
)
def test_what_is_no_limit_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


RECORDS = [
    RequestRecord(0, 3, 0, 0.5, 4.5, 8, 3, "finished", 1.0, 2.5, 4, [(3.0, 3.5)]),
    RequestRecord(1, 0, 1, 1.0, 1.0, 900, 0, "prompt_exceeds_pool"),
]


def test_a_csv_file_has_a_row_for_each(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    log = RequestLog(str(path))
    for record in RECORDS:
        log.ended(record)
    log.close()
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == tuple(COLUMNS)
    assert (first["preemptions"], first["hit_tokens"], first["session"]) == ("1", "4", "3")
    assert [float(first[name]) for name in ("arrival", "admitted", "ttft", "itl", "e2e")] == [0.5, 1.0, 2.0, 1.0, 4.0]
    assert (second["outcome"], second["ttft"], second["e2e"]) == ("prompt_exceeds_pool", "", "")


def test_a_parquet_file_has_the_same_with_types(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "requests.parquet")
    log = RequestLog(path)
    for record in RECORDS * 5000:
        log.ended(record)
    log.close()
    rows = parquet.read_table(path).to_pylist()
    assert len(rows) == 10_000
    assert (rows[0]["ttft"], rows[0]["request"], rows[9_999]["ttft"]) == (2.0, 0, None)


@pytest.mark.parametrize(
    ("name", "message"), [("requests.txt", "end it in .csv or .parquet"), ("no/requests.csv", "cannot be written")]
)
def test_a_file_that_cannot_be_written_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        RequestLog(str(tmp_path / name))
