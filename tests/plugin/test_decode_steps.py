"""Steps in one pass beside vLLM's own code: the same outputs and the same state, whichever of them took a step."""

from collections.abc import Iterator
from typing import Any

import pytest
import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvledger.integrations.vllm import schedulers
from kvledger.integrations.vllm.decode_steps import known_changes, reason_against
from kvledger.integrations.vllm.decoding import Decodings, is_plain
from kvledger.integrations.vllm.plugin import STEP
from kvledger.integrations.vllm.restated import changed_code
from kvledger.integrations.vllm.schedulers import take_decode_steps
from tests.plugin.scheduler_pair import SchedulerPair, Traffic
from tests.side_by_side.layouts import Group, Layout
from tests.side_by_side.reference import RequestFactory

FULL = Layout("full", (Group("full", 4),))
SIX = Layout("six groups", (Group("full", 4), *[Group("window", 4, window=8)] * 5))
MIXED = Layout("mixed block sizes", (Group("full", 4), Group("window", 8, window=16)))
UNCACHED = Layout("uncached", (Group("full", 4),), enable_caching=False)

TRAFFIC = {
    "everyday": Traffic(FULL),
    "async": Traffic(FULL, is_async=True),
    "second runner, async": Traffic(FULL, is_async=True, has_first_runner=False),
    "small pool, second runner": Traffic(FULL, num_blocks=34, arrivals=0.13, has_first_runner=False),
    "small pool, async": Traffic(FULL, is_async=True, num_blocks=34, arrivals=0.13),
    "priority": Traffic(FULL, policy="priority", num_blocks=34, arrivals=0.13),
    "priority, async": Traffic(FULL, policy="priority", num_blocks=34, arrivals=0.13, is_async=True),
    "crowded": Traffic(FULL, arrivals=0.3),
    "six groups": Traffic(SIX, num_blocks=600),
    "six groups, async": Traffic(SIX, num_blocks=150, is_async=True),
    "mixed block sizes": Traffic(MIXED, num_blocks=120),
    "uncached": Traffic(UNCACHED, is_async=True),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_the_same_as_vllm(name: str, num_traffic_steps: int, traffic_seed: int) -> None:
    pair = SchedulerPair(TRAFFIC[name], traffic_seed)
    pair.live(num_traffic_steps)
    steps = pair.ours.decode_steps
    # Both took many steps, so that each found what the other had left.
    assert min(steps.num_scheduled, steps.num_left_to_schedule) > 0.03 * num_traffic_steps
    assert min(steps.num_returned, steps.num_left_to_return) > 0.03 * num_traffic_steps
    assert pair.num_preemptions > 0 or not name.startswith(("small pool", "priority"))


def made(is_async: bool = False, **changes: Any) -> Any:
    """A scheduler of vLLM's own class over the ledger, with attributes changed before it is looked at."""
    pair = SchedulerPair(Traffic(FULL, is_async=is_async), seed=1, takes_decode_steps=False)
    for name, value in changes.items():
        setattr(pair.ours, name, value)
    return pair.ours


def test_an_engines_scheduler_becomes_one_of_ours(log: list[str]) -> None:
    for is_async, theirs, ours in (
        (False, Scheduler, schedulers.Scheduler),
        (True, AsyncScheduler, schedulers.AsyncScheduler),
    ):
        scheduler = made(is_async)
        assert type(scheduler) is theirs
        take_decode_steps(scheduler)
        assert type(scheduler) is ours
    assert log == ["steps in which every request decodes take one pass"] * 2


def test_a_scheduler_class_of_the_users_own_stays() -> None:
    class Own(Scheduler):  # type: ignore[misc]
        pass

    scheduler = made()
    scheduler.__class__ = Own
    take_decode_steps(scheduler)
    assert type(scheduler) is Own


@pytest.mark.parametrize("word", ["0", "off", "No", "false"])
def test_the_switch_leaves_it_out(word: str, monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    monkeypatch.setenv(STEP, word)
    scheduler = made()
    take_decode_steps(scheduler)
    assert type(scheduler) is Scheduler
    assert log == ["vLLM's own code takes every step: KVLEDGER_VLLM_STEP says so"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"connector": object()}, "a KV connector"),
        ({"num_spec_tokens": 2, "use_pp": True}, "drafts, pipeline parallelism"),
        ({"num_sampled_tokens_per_step": 0}, "a model without sampling"),
        ({"has_mamba_layers": True}, "recurrent states"),
        ({"_make_cached_request_data": lambda *_: None}, "somebody has replaced _make_cached_request_data"),
        ({"kv_cache_manager": object()}, "it keeps the KV cache"),
    ],
)
def test_engines_that_do_more_than_decode_are_left_to_vllm(changes: dict[str, Any], reason: str) -> None:
    assert reason_against(made()) is None
    assert reason_against(made(**changes)) == reason


def test_the_installed_vllm_is_known() -> None:
    assert changed_code(vllm.__version__) == []


@pytest.fixture
def sources_are_read_again() -> Iterator[None]:
    known_changes.cache_clear()
    yield
    known_changes.cache_clear()


@pytest.mark.usefixtures("sources_are_read_again")
def test_a_vllm_with_other_code_is_named_and_takes_its_steps_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Scheduler._update_after_schedule

    def patched(self: Any, scheduler_output: Any) -> None:
        theirs(self, scheduler_output)

    monkeypatch.setattr(Scheduler, "_update_after_schedule", patched)
    assert changed_code(vllm.__version__) == ["v1.core.sched.scheduler:Scheduler._update_after_schedule"]
    assert reason_against(made()) == (
        f"vLLM {vllm.__version__} has other code than is known here: "
        "v1.core.sched.scheduler:Scheduler._update_after_schedule"
    )
    assert changed_code("0.31.2") == ["everything, in a release that nobody here has read"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structured_output_request", object()),
        ("mm_features", [object()]),
        ("resumable", True),
        ("pooling_params", object()),
        ("sampling_params", None),
    ],
)
def test_a_request_that_does_more_than_decode_is_not_plain(name: str, value: object) -> None:
    request = RequestFactory(FULL).make("r1", [1, 2, 3])
    assert is_plain(request)
    setattr(request, name, value)
    assert not is_plain(request)


def test_requests_that_are_gone_are_not_kept() -> None:
    """33 requests come and are aborted at once; what is known of them goes once it is more than there are by 16."""
    factory = RequestFactory(FULL)
    scheduler = made()
    decodings = Decodings(scheduler)
    for index in range(33):
        request = factory.make(f"r{index}", [1, 2, 3])
        decodings.of(request.request_id, request)
    # The 18th came when 17 were known and nobody was there: it alone stayed. So did the others behind it, up to 33.
    assert len(decodings) == 16
    again = factory.make("r32", [1, 2, 3])
    decoding = decodings.of("r32", again)
    assert decoding is not None
    assert decoding.request is again
