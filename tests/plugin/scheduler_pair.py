"""vLLM's scheduler and ours, driven by the same random traffic and compared after every call.

Compared are all fields of what schedule() and update_from_output() return, and what is left behind: every attribute of
the scheduler and of each request that holds plain values, the blocks of each request, the pool, and published events.
"""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from tempfile import mkdtemp
from typing import Any

import msgspec
import numpy as np
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEvent
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvledger.integrations.vllm.manager import VllmKVCacheManager
from kvledger.integrations.vllm.schedulers import take_decode_steps
from tests.plugin.manager_pair import assert_same_pool
from tests.side_by_side.layouts import Layout
from tests.side_by_side.reference import RequestFactory, make_scheduler, manager_arguments

# Little more than the longest prompt, so that answers reach it.
MAX_MODEL_LEN = 90
# Few, so that stop tokens come up and answers repeat themselves.
VOCABULARY = 30
EOS = 7
# Clocks, and what only counts in one of the two.
NOT_COMPARED = {"timestamp", "ts", "arrival_time"}


@dataclass(frozen=True)
class Traffic:
    """What a pair lives through. Shares are those of steps, or of requests."""

    layout: Layout
    is_async: bool = False
    policy: str = "fcfs"
    num_blocks: int = 200
    has_first_runner: bool = True
    arrivals: float = 0.1
    unusual: float = 0.05
    troubles: float = 0.05


class SchedulerPair:
    """Both schedulers. `ours.decode_steps` counts which steps took one pass."""

    def __init__(self, traffic: Traffic, seed: int, *, takes_decode_steps: bool = True) -> None:
        self.traffic = traffic
        self.rng = random.Random(seed)
        self.factory = RequestFactory(traffic.layout)
        self.published: tuple[list[Any], list[Any]] = ([], [])
        self.theirs = self._make(KVCacheManager, self.published[0])
        self.ours = self._make(VllmKVCacheManager, self.published[1])
        if takes_decode_steps:
            take_decode_steps(self.ours)
        self.both = (self.theirs, self.ours)
        self.texts = [[self.rng.randrange(VOCABULARY) for _ in range(80)] for _ in range(4)]
        # Steps whose output is not back: their outputs, and what the workers sampled.
        self.in_flight: deque[tuple[tuple[Any, Any], dict[str, list[int]]]] = deque()
        self.num_made = 0
        self.num_steps = 0
        self.num_preemptions = 0

    def _make(self, manager: Any, published: list[Any]) -> Any:
        traffic = self.traffic
        made = make_scheduler(
            mkdtemp(),
            layout=traffic.layout,
            num_blocks=traffic.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=48,
            policy=traffic.policy,
            async_scheduling=traffic.is_async,
        )
        arguments = manager_arguments(
            traffic.layout, traffic.num_blocks, MAX_MODEL_LEN, enable_kv_cache_events=traffic.layout.enable_caching
        )
        made.kv_cache_manager = manager(**arguments)
        made.finished_req_ids_dict = defaultdict(set)
        made.use_v2_model_runner = not traffic.has_first_runner
        made.kv_event_publisher.publish = lambda batch: published.append(repr(batch.events))
        return made

    # What happens

    def live(self, num_steps: int) -> None:
        rng, traffic = self.rng, self.traffic
        for _ in range(num_steps):
            while rng.random() < traffic.arrivals:
                self.add()
            if rng.random() < traffic.troubles:
                rng.choice([self.abort, self.abort, self.go_on, self.reset, self.pause, self.pause])()
            self.step()
        for scheduler in self.both:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        while self.in_flight:
            self.take_back()
        self.ours.kv_cache_manager.ledger.check()

    def add(self) -> None:
        rng = self.rng
        self.num_made += 1
        prompt = rng.choice(self.texts)[: rng.randint(1, 70)]
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 8))]
        is_unusual = rng.random() < self.traffic.unusual
        stops = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 1, 2])))
        kind = rng.choice(["logprobs", "repetition", "session"]) if is_unusual else ""
        ends_at_eos = rng.random() < 0.3
        sizes = {"max_tokens": rng.randint(1, 60), "priority": rng.randrange(3), "stop_token_ids": stops}
        client, min_tokens = rng.randrange(3), rng.choice([0, 0, 5])
        for scheduler in self.both:
            request = self.factory.make(f"r{self.num_made}", list(prompt), arrival_time=float(self.num_made), **sizes)
            params = request.sampling_params
            params.min_tokens = min(min_tokens, request.max_tokens)
            params._eos_token_id = EOS if ends_at_eos else None
            if kind == "logprobs":
                params.logprobs = 1
            elif kind == "repetition":
                params.repetition_detection = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
            request.resumable = kind == "session"
            request.client_index = client
            request.trace_headers = {"id": request.request_id}
            scheduler.add_request(request)

    def abort(self) -> None:
        request_ids = list(self.theirs.requests)
        if request_ids:
            request_id = self.rng.choice(request_ids)
            for scheduler in self.both:
                scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def go_on(self) -> None:
        """More input for a session, or its end."""
        sessions = [
            request_id
            for request_id, request in self.theirs.requests.items()
            if request.resumable and request.num_tokens < MAX_MODEL_LEN - 12
        ]
        if sessions:
            request_id, more = self.rng.choice(sessions), self.rng.random() < 0.6
            prompt = [self.rng.randrange(VOCABULARY) for _ in range(3)]
            for scheduler in self.both:
                request = self.factory.make(request_id, list(prompt), max_tokens=8)
                request.resumable = more
                scheduler.add_request(request)

    def reset(self) -> None:
        # Sessions that wait for input hold blocks, and vLLM cannot preempt those.
        preempts = self.rng.random() < 0.5 and not self.theirs.kv_holding_waiting
        done = [scheduler.reset_prefix_cache(reset_running_requests=preempts) for scheduler in self.both]
        assert done[0] == done[1]

    def pause(self) -> None:
        state = self.rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL, PauseState.UNPAUSED])
        for scheduler in self.both:
            scheduler.set_pause_state(state)

    def step(self) -> None:
        """One step out, and those back that are due."""
        rng = self.rng
        if rng.random() < 0.4:
            for scheduler in self.both:
                scheduler.set_pause_state(PauseState.UNPAUSED)
        self.num_steps += 1
        outputs = tuple(scheduler.schedule() for scheduler in self.both)
        same(*map(plain, outputs))
        self.num_preemptions += len(outputs[0].preempted_req_ids)
        self.compare()
        if outputs[0].total_num_scheduled_tokens:
            self.in_flight.append(((outputs[0], outputs[1]), self._sampled(outputs[0])))
        elif rng.random() < 0.3:
            # Sessions that wait for input can hold all blocks.
            self.abort()
        most_in_flight = 2 if self.traffic.is_async else 1
        while len(self.in_flight) >= most_in_flight and (rng.random() < 0.9 or len(self.in_flight) > most_in_flight):
            if rng.random() < 0.02:
                self.abort()
            self.take_back()

    def take_back(self) -> None:
        outputs, sampled = self.in_flight.popleft()
        request_ids = list(sampled)
        self.rng.shuffle(request_ids)
        nans = {request_ids[0]: 1} if self.rng.random() < 0.02 else None
        has_logprobs = any(
            request.sampling_params.num_logprobs for each in sampled if (request := self.theirs.requests.get(each))
        )
        returned: list[Any] = []
        for scheduler, output in zip(self.both, outputs, strict=True):
            back = ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
                sampled_token_ids=[list(sampled[request_id]) for request_id in request_ids],
                logprobs=_logprobs([sampled[request_id] for request_id in request_ids]) if has_logprobs else None,
                num_nans_in_logits=nans,
            )
            returned.append(plain(scheduler.update_from_output(output, back)))
        same(*returned)
        self.compare()

    def _sampled(self, output: Any) -> dict[str, list[int]]:
        """What the workers will sample: nothing in the middle of a prompt, or one token."""
        sampled: dict[str, list[int]] = {}
        for request_id in output.num_scheduled_tokens:
            is_chunk = self.theirs.requests[request_id].is_prefill_chunk
            sampled[request_id] = [] if is_chunk else [self.rng.randrange(VOCABULARY)]
        return sampled

    # What is left behind

    def compare(self) -> None:
        theirs, ours = self.both
        same(state_of(theirs), state_of(ours))
        for request_id, request in theirs.requests.items():
            same(plain(vars(request)), plain(vars(ours.requests[request_id])))
            blocks = [scheduler.kv_cache_manager.get_block_ids(request_id) for scheduler in self.both]
            same(*blocks)
        assert_same_pool(theirs.kv_cache_manager.block_pool, ours.kv_cache_manager.block_pool)
        same(*self.published)


def same(theirs: Any, ours: Any) -> None:
    if theirs != ours:
        if isinstance(theirs, dict) and isinstance(ours, dict):
            differing = [key for key in {**theirs, **ours} if theirs.get(key, "-") != ours.get(key, "-")]
            theirs, ours = [{key: side.get(key, "-") for key in differing} for side in (theirs, ours)]
        raise AssertionError(f"\nvLLM: {theirs}\nhere: {ours}")


def state_of(scheduler: Any) -> dict[str, Any]:
    """All attributes of a scheduler that hold plain values and can change."""
    return {
        name: plain(value)
        for name, value in vars(scheduler).items()
        if name not in ("decode_steps", "kv_cache_manager") and not name.endswith("_config")
    }


def plain(value: Any) -> Any:
    """A value as something that can be compared: records as the dicts of their fields, requests by their names."""
    if isinstance(value, (bool, int, float, str, bytes, Enum)) or value is None:
        return value
    if isinstance(value, Request):
        return value.request_id
    if isinstance(value, EngineCoreEvent):
        return value.type
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items() if key not in NOT_COMPARED}
    if isinstance(value, (set, frozenset)):
        return {plain(each) for each in value}
    if isinstance(value, (list, tuple, deque)):
        return [plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__ if name not in NOT_COMPARED}
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return type(value).__name__


def _logprobs(sampled: list[list[int]]) -> LogprobsLists:
    """One candidate beside each token."""
    rows = [token for tokens in sampled for token in tokens]
    starts = [sum(map(len, sampled[:index])) for index in range(len(sampled))]
    return LogprobsLists(
        np.array([[token, token] for token in rows]).reshape(-1, 2),
        np.array([[-1.0, -2.0] for _ in rows]).reshape(-1, 2),
        np.array([1 for _ in rows]),
        starts,
    )
