"""What a ledger decides as one release of vLLM or as another."""

import pytest

from kvledger import DraftRule, KVCacheManager
from kvledger.core.groups.decisions import LATEST_RELEASE, RELEASES, decisions_of
from kvledger.errors import ConfigError
from tests.engine import Engine
from tests.helpers import admit, cached_ids, hit, leave, ledger, other, request


def test_the_newest_known_release_is_the_default() -> None:
    assert RELEASES == ("0.32", "0.33")
    assert LATEST_RELEASE == "0.33"
    assert ledger(usable=8).decisions == decisions_of("0.33")
    with pytest.raises(ConfigError, match=r"decisions='0\.31': no release of vLLM .* use 0\.32 or 0\.33"):
        ledger(usable=8, decisions="0.31")


def filled(num_tokens: int, **options: object) -> KVCacheManager:
    """A ledger in whose cache a prompt of so many tokens is."""
    manager = ledger(usable=20, **options)
    a = request("a", num_tokens)
    assert admit(manager, a) is not None
    leave(manager, a)
    return manager


def test_a_draft_loses_its_last_block_or_looks_at_the_token_behind_it() -> None:
    """Blocks of 4; a prompt of 17 tokens leaves 4 full blocks."""
    before, since = filled(17, drafts=DraftRule(), decisions="0.32"), filled(17, drafts=DraftRule())
    assert hit(before, request("same", 17)) == 12
    assert hit(since, request("same", 17)) == 16
    # Another token behind block 3: its draft values are others, and so is its name. The old rule drops it anyway.
    changed = [*range(16), 99, 98]
    assert hit(before, request("changed", changed)) == 12
    assert hit(since, request("changed", changed)) == 12
    # The prompt ends with block 3: nobody knows yet what comes behind.
    assert hit(since, request("shorter", 16)) == 12


def test_beside_a_connector_the_old_rule_stays_and_some_drafts_need_none() -> None:
    assert hit(filled(17, drafts=DraftRule(hashes_ahead=False)), request("b", 17)) == 12
    for release in RELEASES:
        independent = filled(17, drafts=DraftRule(values_depend_on_next=False), decisions=release)
        assert hit(independent, request("b", 17)) == 16


def test_a_block_is_indexed_when_its_name_is_known() -> None:
    manager = ledger(usable=20, drafts=DraftRule())
    a = request("a", 8)
    assert admit(manager, a) is not None
    # 8 tokens fill two blocks; the second one is named by the token behind it, which the model has not said yet.
    assert len(cached_ids(manager)) == 1
    a.num_computed_tokens = 8
    a.append_token(50)
    assert manager.allocate_slots(a, 1) is not None
    assert len(cached_ids(manager)) == 2
    manager.check()


@pytest.mark.parametrize("release", RELEASES)
def test_a_stop_inside_a_verified_draft(release: str) -> None:
    """7 tokens and their first one; a step verifies 3 drafts, all right, and the second token is a stop: 11 tokens are
    computed, of which the last two lie behind the stop."""
    engine = Engine(20, num_speculative_tokens=3, decisions=release)
    engine.add("a", other(7, 1), max_tokens=30, stop_token_ids=(7,))
    scheduler = engine.scheduler
    a = scheduler.get_request("a")
    scheduler.update_from_output(scheduler.schedule(), [[5]])
    scheduler.update_draft_tokens("a", [6, 7, 8])
    step = scheduler.schedule()
    assert step.draft_token_ids == {"a": [6, 7, 8]}
    assert [gained.new_token_ids for gained in scheduler.update_from_output(step, [[6, 7, 8, 9]])] == [[6, 7]]
    assert a.num_computed_tokens == {"0.32": 11, "0.33": 9}[release]
