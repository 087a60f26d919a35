"""What a request cost, counted by hand. tests/account_checker.py compares the same with every step of every test."""

import pytest

from kvledger import KVCacheConfig, KVCacheGroupSpec, KVCacheManager, SlidingWindowSpec
from kvledger.errors import ConfigError, InvariantError, UnknownRequestError
from kvledger.scheduler import ExternalHit, RequestAccount, RequestAccounting, Scheduler, SchedulerConfig
from tests.engine import Engine
from tests.helpers import ledger, other, request


def tokens(account: RequestAccount) -> dict[str, int]:
    return {
        "cached": account.num_cached_tokens,
        "external": account.num_external_tokens,
        "computed": account.num_computed_tokens,
        "recomputed": account.num_recomputed_tokens,
        "lost": account.num_lost_tokens,
    }


def test_a_prompt_and_its_decodes() -> None:
    engine = Engine(8)
    engine.add("a", 6, max_tokens=4)
    engine.run()
    # The fourth token is sampled and never computed.
    assert tokens(engine.accounts["a"]) == {"cached": 0, "external": 0, "computed": 9, "recomputed": 0, "lost": 0}
    assert (engine.accounts["a"].num_blocks_peak, engine.accounts["a"].num_steps_waited) == (3, 0)
    finish = engine.accounts["a"].finish
    assert finish is not None
    assert finish.name == engine.finished["a"] == "FINISHED_LENGTH"


def test_a_prefix_hit_and_an_external_one() -> None:
    engine = Engine(20)
    engine.add("a", 12, max_tokens=1)
    engine.run()
    engine.source.offers["b"] = ExternalHit(5)
    engine.add("b", list(range(12)) + other(8), max_tokens=1)
    engine.run()
    assert tokens(engine.accounts["b"]) == {"cached": 12, "external": 5, "computed": 3, "recomputed": 0, "lost": 0}
    assert engine.accounts["b"].num_blocks_peak == 5


def test_an_account_is_live() -> None:
    engine = Engine(8, max_num_batched_tokens=8)
    engine.add("a", 14)
    assert engine.accounting.get("a").num_computed_tokens == 0
    engine.step()
    account = engine.accounting.get("a")
    assert (account.num_computed_tokens, account.num_blocks_peak, account.finish) == (8, 2, None)
    engine.step()
    assert account.num_computed_tokens == 14


def test_what_a_preemption_costs() -> None:
    engine = Engine(4)
    engine.add("a", other(8, 1), max_tokens=3)
    engine.add("b", other(5, 2), max_tokens=3)
    engine.run()
    # b computed its prompt of 5, lost it to a, and found its first block again: 1 of the 5 is computed twice. With its
    # first sampled token and the next it computes 5 + 1 + 2 in all.
    assert engine.preemptions == {"b": 1}
    assert tokens(engine.accounts["b"]) == {"cached": 4, "external": 0, "computed": 8, "recomputed": 1, "lost": 5}
    assert tokens(engine.accounts["a"]) == {"cached": 0, "external": 0, "computed": 10, "recomputed": 0, "lost": 0}


def test_totals_are_of_the_ended_and_of_the_live() -> None:
    engine = Engine(4)
    engine.add("a", other(8, 1), max_tokens=3)
    engine.add("b", other(5, 2), max_tokens=3)
    engine.run()
    engine.add("c", other(6, 3), max_tokens=9)
    engine.step()
    totals = engine.accounting.totals()
    # a computed 10, b 8 (see above), c its prompt of 6 so far.
    assert (totals.num_requests, totals.num_computed_tokens, totals.num_cached_tokens) == (3, 24, 4)
    assert (totals.num_preemptions, totals.num_lost_tokens, totals.num_recomputed_tokens) == (1, 5, 1)
    engine.step()
    assert (totals.num_computed_tokens, engine.accounting.totals().num_computed_tokens) == (24, 25)


def test_time_waited_in_steps_and_seconds() -> None:
    engine = Engine(8, max_num_seqs=1)
    engine.add("a", other(4, 1), max_tokens=3)
    engine.add("b", other(4, 2), max_tokens=2)
    engine.run()
    # a runs in steps 1 to 3 and b in 4 and 5. The engine's clock shows 10 seconds a step, and 40 in the fourth.
    assert (engine.accounts["a"].num_steps_waited, engine.accounts["a"].seconds_waited) == (0, 10.0)
    assert (engine.accounts["b"].num_steps_waited, engine.accounts["b"].seconds_waited) == (3, 40.0)


def test_time_waited_by_one_that_never_ran() -> None:
    engine = Engine(8, max_num_seqs=1)
    engine.add("a", other(4, 1))
    engine.add("b", other(4, 2))
    engine.steps(2)
    assert engine.accounting.get("b").num_steps_waited == 2
    engine.step()
    engine.scheduler.abort("b")
    assert engine.accounts["b"].num_steps_waited == 3


def test_drafts_accepted_and_rejected() -> None:
    engine = Engine(20)
    engine.add("a", 4, max_tokens=9)
    engine.step()
    for num_accepted in (3, 0, 1):
        engine.scheduler.update_draft_tokens("a", [700_000] * 3)
        engine.step(lambda request_id, num_drafts, accepted=num_accepted: accepted)
    account = engine.accounting.get("a")
    assert (account.num_drafts_accepted, account.num_drafts_rejected) == (4, 5)
    # The prompt, the three steps' own tokens, and the drafts that were accepted.
    assert account.num_computed_tokens == 4 + 3 + 4


@pytest.mark.parametrize(
    ("num_valid", "cached", "external", "computed"),
    # b's prompt of 16 has 4 tokens here and 8 in the store.
    [(12, 4, 8, 4), (10, 4, 6, 6), (4, 4, 0, 12), (2, 4, 0, 12), (0, 4, 8, 4)],
)
def test_a_load_that_brings_less_than_was_offered(num_valid: int, cached: int, external: int, computed: int) -> None:
    engine = Engine(20)
    engine.add("a", 4, max_tokens=1)
    engine.run()
    engine.source.offers["b"] = ExternalHit(8, asynchronous=True)
    engine.add("b", list(range(4)) + other(12), max_tokens=1)
    engine.step()
    engine.load("b", num_valid)
    engine.step()
    if num_valid == 0:  # b asks again, and this time it works
        engine.load("b")
    engine.run()
    told = tokens(engine.accounts["b"])
    assert told == {"cached": cached, "external": external, "computed": computed, "recomputed": 0, "lost": 0}


def test_a_fork_takes_over_what_its_parent_computed() -> None:
    engine = Engine(12)
    engine.add("a", 9, max_tokens=3)
    engine.step()
    engine.tokens["b"] = []
    assert engine.scheduler.fork("a", ["b"])
    engine.run()
    assert tokens(engine.accounts["b"]) == {"cached": 9, "external": 0, "computed": 2, "recomputed": 0, "lost": 0}


def test_the_peak_of_a_window_is_in_the_middle_of_its_prompt() -> None:
    spec = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, sliding_window=8)
    manager = KVCacheManager(KVCacheConfig(41, (KVCacheGroupSpec(("layer",), spec),)), 256)
    bills: list[RequestAccount] = []
    accounting = RequestAccounting(manager, on_finish=bills.append)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
    scheduler = Scheduler(manager, config, accounting=accounting)
    scheduler.add_request(request("a", 40, max_tokens=3))
    held: list[int] = []
    while scheduler.has_unfinished_requests:
        output = scheduler.schedule()
        ids = manager.get_block_ids("a")[0]
        held.append(len(ids) - ids.count(0))
        scheduler.update_from_output(output, [[1] if scheduler.get_request("a").num_computed_tokens >= 40 else []])
    # Chunks of 16, 16 and 8: behind a chunk's 4 blocks the window keeps up to 2 blocks more.
    assert held == [4, 6, 4, 3, 3]
    assert bills[0].num_blocks_peak == 6


def test_accounts_of_requests_that_are_gone_are_not_kept() -> None:
    engine = Engine(8)
    for number in range(20):
        engine.add(str(number), other(4, number), max_tokens=2)
    engine.run()
    assert len(engine.accounting) == 0
    with pytest.raises(UnknownRequestError, match="request_id='7': not here, or finished already; see on_finish"):
        engine.accounting.get("7")


def test_accounts_of_another_manager_are_refused() -> None:
    accounting = RequestAccounting(ledger(8))
    with pytest.raises(ConfigError, match=r"^accounting=.*: it counts the blocks of another manager; make it with the"):
        Scheduler(ledger(8), SchedulerConfig(), accounting=accounting)


def test_a_lost_token_is_found_by_check() -> None:
    engine = Engine(8)
    engine.add("a", 6)
    engine.step()
    engine.accounting.get("a").num_cached_tokens += 1
    with pytest.raises(InvariantError, match="account of 'a': 7 tokens had, 6 now, 0 lost"):
        engine.scheduler.check()
