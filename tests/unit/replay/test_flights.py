"""The flight book against a naive account that writes down every token and every computed position."""

from collections import defaultdict
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvledger.metrics.samples import WeightedSamples
from kvledger.replay.config import ReplayConfig
from kvledger.replay.ledger import EvictionMeter
from kvledger.replay.result import Percentiles, ReplayResult
from kvledger.replay.scheduled import ScheduledReplay
from kvledger.replay.serving import ServingByBlocks
from kvledger.scheduler import Scheduler, SchedulerConfig, SchedulingPolicy
from kvledger.traces.arrivals import RecordedArrivals
from kvledger.traces.prompts import make_prompt_maker
from kvledger.traces.trace_request import TraceRequest
from tests.unit.replay.engines import ONE_SECOND, one_group


class NaiveReplay:
    """Everything that arrived goes to the scheduler at once; every token of every step is written down."""

    def __init__(self, requests: list[TraceRequest], config: ReplayConfig) -> None:
        maker = make_prompt_maker("none", config.hash_block_size)
        self.scheduler = Scheduler(config.make_manager(maker, EvictionMeter()), config.scheduler)
        self.token_times: dict[str, list[float]] = defaultdict(list)
        self.num_recomputed = 0
        self.num_steps = 0
        self._computed: dict[str, int] = defaultdict(int)
        now = 0.0
        pending = list(enumerate(requests))
        while pending or self.scheduler.has_unfinished_requests:
            while pending and pending[0][1].arrival_time <= now:
                serial, recorded = pending.pop(0)
                self.scheduler.add_request(maker.make(recorded, serial))
            if not self.scheduler.has_unfinished_requests:
                now = pending[0][1].arrival_time
                continue
            now = self._step(now)
        self.ttft = [times[0] - requests[int(id)].arrival_time for id, times in self.token_times.items()]
        self.gaps = [b - a for times in self.token_times.values() for a, b in pairwise(times)]

    def _step(self, now: float) -> float:
        output = self.scheduler.schedule()
        self.num_steps += 1
        for request_id, (start, end) in output.ranges_by_request().items():
            seen = self._computed[request_id]
            self.num_recomputed += max(0, min(seen, end) - start)
            self._computed[request_id] = max(seen, end)
        now += 1.0 if output.total_num_scheduled_tokens else 0.0
        sampled = [[] if request.is_prefill_chunk else [7] for request in output.requests]
        for gained in self.scheduler.update_from_output(output, sampled):
            self.token_times[gained.request_id].append(now)
        return now


def percentiles(values: list[float]) -> Percentiles | None:
    return WeightedSamples(values, [1.0] * len(values)).percentiles()


def replay(requests: list[TraceRequest], config: ReplayConfig) -> ReplayResult:
    arrivals = RecordedArrivals(iter(requests))
    maker = make_prompt_maker("none", config.hash_block_size)
    return ScheduledReplay(arrivals, ServingByBlocks(config, maker), config, ONE_SECOND).run(lambda done, arrived: None)


@settings(max_examples=120, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 60), st.integers(1, 20), st.integers(0, 2), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(21, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
    policy=st.sampled_from(SchedulingPolicy),
)
# Under PRIORITY the request that needs a block may be the one to go; the step then ends before those behind it.
@example(
    work=[*[(0, 1, 1, 0, 0)] * 8, (0, 24, 10, 0, 0), (4, 41, 9, 0, 1), (1, 1, 1, 0, 0), (0, 38, 5, 1, 0)],
    num_blocks=27,
    max_num_seqs=3,
    budget=18,
    policy=SchedulingPolicy.PRIORITY,
)
def test_every_token_and_every_recomputed_position_is_accounted_for(
    work: list[tuple[int, int, int, int, int]],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    policy: SchedulingPolicy,
) -> None:
    # Pools of 20 blocks of 4 tokens and more: every request fits alone, few fit together.
    requests: list[TraceRequest] = []
    time = 0.0
    for gap, num_prompt, num_output, prefix, priority in work:
        time += gap
        ids = [prefix * 100 + i for i in range(-(-num_prompt // 4))]
        requests.append(TraceRequest(time, num_prompt, num_output, ids, 4, priority=priority))
    config = ReplayConfig(num_blocks, one_group(4), scheduler=SchedulerConfig(max_num_seqs, budget, policy))
    naive = NaiveReplay(requests, config)
    result = replay(requests, config)
    assert result.num_finished == len(requests)
    assert result.num_steps == naive.num_steps
    assert result.num_preemptions == naive.scheduler.num_preemptions
    assert result.num_recomputed_tokens == naive.num_recomputed
    assert result.ttft_seconds == percentiles(naive.ttft)
    ends = [times[-1] - requests[int(number)].arrival_time for number, times in naive.token_times.items()]
    assert result.e2e_seconds == percentiles(ends)
    assert result.inter_token_seconds == percentiles(naive.gaps)
