"""One real vLLM engine in this process, with or without the ledger, and everything that it did."""

import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.core.sched.scheduler import Scheduler

from kvledger.integrations.vllm.decode_steps import DecodeSteps
from kvledger.integrations.vllm.manager import VllmKVCacheManager
from kvledger.integrations.vllm.plugin import install

_LIMITS = {"enforce_eager": True, "max_model_len": 416, "block_size": 32, "seed": 0, "disable_log_stats": False}
VOCABULARY = range(3, 900)


class EngineRun:
    """An engine and its record: tokens of finished requests, steps with block ids, events, statistics of every step."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.tokens: list[Any] = []
        self.steps: list[Any] = []
        self.events: list[Any] = []
        self.stats: list[Any] = []
        self.rng = random.Random(1)
        self.texts = [[self.rng.choice(VOCABULARY) for _ in range(300)] for _ in range(4)]
        self._num_started = 0
        # Of an engine that is shut down, where steps of decodes took one pass.
        self.decode_steps: DecodeSteps | None = None

    def prompt(self, shortest: int = 20, longest: int = 300) -> list[int]:
        """The start of one of a few texts, and something new: so that prefixes meet."""
        start = self.rng.choice(self.texts)[: self.rng.randint(shortest, longest)]
        return start + [self.rng.choice(VOCABULARY) for _ in range(self.rng.randint(1, 40))]

    def generate(self, num_prompts: int, max_tokens: int = 40, longest: int = 300, **sampling: Any) -> None:
        """So many prompts at once, answered with up to max_tokens tokens each, until all are done."""
        params = {"temperature": 0, "ignore_eos": True, **sampling}
        prompts = [{"prompt_token_ids": self.prompt(longest=longest)} for _ in range(num_prompts)]
        lengths = [self.rng.randint(1, max_tokens) for _ in prompts]
        done = self.llm.generate(prompts, [SamplingParams(max_tokens=n, **params) for n in lengths], use_tqdm=False)
        self.tokens += [[list(output.token_ids) for output in request.outputs] for request in done]
        self.tokens.append([request.num_cached_tokens for request in done])

    def start(self, num_prompts: int, max_tokens: int = 50, longest: int = 300) -> list[str]:
        """Adds requests without running them."""
        names: list[str] = []
        for _ in range(num_prompts):
            self._num_started += 1
            names.append(f"started-{self._num_started}")
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            self.engine.add_request(names[-1], {"prompt_token_ids": self.prompt(longest=longest)}, params)
        return names

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.engine.has_unfinished_requests():
                done = [request for request in self.engine.step() if request.finished]
                self.tokens += [list(request.outputs[0].token_ids) for request in done]

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def record(self) -> dict[str, list[Any]]:
        return {"tokens": self.tokens, "steps": self.steps, "events": self.events, "stats": self.stats}


@contextmanager
def engine_run(with_ledger: bool, **arguments: Any) -> Iterator[EngineRun]:
    """An engine for the length of a with statement. The record begins when it is up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setattr(Scheduler, "__init__", Scheduler.__init__)
        if with_ledger:
            install()
        try:
            with _hidden_from_vllm("llvmlite"):
                run = EngineRun(LLM(**{**_LIMITS, **arguments}))
            assert isinstance(run.manager, VllmKVCacheManager) == with_ledger
            _record(run)
            yield run
            if with_ledger:
                run.manager.ledger.check()
            run.engine.engine_core.shutdown()
            run.decode_steps = getattr(run.scheduler, "decode_steps", None)
            del run.llm, run.engine, run.scheduler, run.manager
        finally:
            gc.collect()
            cleanup_dist_env_and_memory()


@contextmanager
def _hidden_from_vllm(package: str) -> Iterator[None]:
    """vLLM looks through all modules when an engine starts, and stumbles over objects of llvmlite (numba uses it)."""
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}
    try:
        yield
    finally:
        sys.modules.update(modules)


def _record(run: EngineRun) -> None:
    schedule, make_stats, take_events = run.scheduler.schedule, run.scheduler.make_stats, run.manager.take_events

    def recorded_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        run.steps.append(describe_step(output))
        return output

    def recorded_stats(*args: Any, **kwargs: Any) -> Any:
        stats = make_stats(*args, **kwargs)
        if stats is not None:
            run.stats.append((stats.kv_cache_usage, repr(stats.prefix_cache_stats)))
        return stats

    def recorded_events() -> list[Any]:
        events: list[Any] = take_events()
        run.events.extend(repr(event) for event in events)
        return events

    run.scheduler.schedule = recorded_schedule
    run.scheduler.make_stats = recorded_stats
    run.manager.take_events = recorded_events


def _name(request_id: str) -> str:
    """vLLM appends something random to a request's name."""
    name, _, end = request_id.rpartition("-")
    return name if name and len(end) == 8 else request_id


def describe_step(output: Any) -> dict[str, Any]:
    """What a step tells the workers, with the lists of block ids as they are now."""
    cached = output.scheduled_cached_reqs
    return {
        "new": [
            (_name(r.req_id), [list(ids) for ids in r.block_ids], r.num_computed_tokens)
            for r in output.scheduled_new_reqs
        ],
        "running": [
            (_name(request_id), None if new is None else [list(ids) for ids in new], num_computed)
            for request_id, new, num_computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ],
        "resumed": sorted(map(_name, cached.resumed_req_ids)),
        "tokens": {_name(r): n for r, n in output.num_scheduled_tokens.items()},
        "drafts": {_name(r): drafts for r, drafts in output.scheduled_spec_decode_tokens.items()},
        "finished": sorted(map(_name, output.finished_req_ids)),
        "zero": output.new_block_ids_to_zero,
        "copies": repr(output.kv_cache_block_copies),
    }
