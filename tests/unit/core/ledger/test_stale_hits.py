"""A prefix hit is a note about a moment. Whoever hands one in later gets what it says or is refused."""

from random import Random

import pytest

from kvledger import KVCacheBlocks, KVCacheManager, KVCacheSpec, PrefixHit, Request
from kvledger.errors import RequestError
from tests.groups import chunks, full, host, hybrid, state, tables, window
from tests.helpers import admit, admitted, free_order, leave, ledger, other, pool_of, request, snapshot


def refused(manager: KVCacheManager, req: Request, num_new: int, found: PrefixHit) -> str:
    """The refusal of that hit, which has changed nothing."""
    before = snapshot(pool_of(manager))
    with pytest.raises(RequestError) as error:
        manager.allocate_slots(req, num_new, found)
    assert snapshot(pool_of(manager)) == before
    assert not manager.holds_blocks(req)
    manager.check()
    return str(error.value)


def test_a_hit_whose_blocks_were_rewritten_by_another_tenant_is_refused():
    manager = ledger(usable=5)
    leave(manager, admitted(manager, "a", 10, cache_salt="one"))
    b = request("b", 10, cache_salt="one")
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 8
    leave(manager, admitted(manager, "x", other(20), cache_salt="two"))  # takes all five blocks

    message = refused(manager, b, 2, found)

    assert message.startswith("hit: not one of request 'b' in this ledger now: block 1 of group 0")
    assert "get_computed_blocks again" in message
    assert admit(manager, b) is not None


def test_a_hit_from_before_a_reset_is_refused():
    manager = ledger(usable=8)
    leave(manager, admitted(manager, "a", 10))
    b = request("b", 10)
    found = manager.get_computed_blocks(b)
    assert manager.reset_prefix_cache()
    refused(manager, b, 2, found)


def test_a_hit_from_before_a_new_epoch_is_refused():
    manager = ledger(usable=8)
    leave(manager, admitted(manager, "a", 10))
    b = request("b", 10)
    found = manager.get_computed_blocks(b)
    manager.start_epoch()
    refused(manager, b, 2, found)


def test_a_hit_of_another_manager_is_refused():
    here, there = ledger(usable=8), ledger(usable=8)
    for manager in (here, there):
        leave(manager, admitted(manager, "a", 10))
    b = request("b", 10)
    refused(here, b, 2, there.get_computed_blocks(b))
    there.check()


def test_a_hit_of_another_request_is_refused():
    manager = ledger(usable=8)
    leave(manager, admitted(manager, "a", 10))
    found = manager.get_computed_blocks(request("b", 10))
    refused(manager, request("c", other(10)), 2, found)


def test_a_hit_of_a_prompt_that_was_cut_is_refused():
    manager = ledger(usable=8)
    leave(manager, admitted(manager, "a", 13))
    b = request("b", 13)
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 12
    b.truncate(9)
    refused(manager, b, 1, found)


def test_a_hit_that_counts_more_tokens_than_it_has_blocks_is_refused():
    manager = ledger(usable=8)
    leave(manager, admitted(manager, "a", 13))
    b = request("b", 13)
    found = manager.get_computed_blocks(b)
    longer = PrefixHit(KVCacheBlocks([found.blocks.blocks[0][:2]]), 12, -1)
    assert "counts 12 tokens and has 2 blocks in group 0" in refused(manager, b, 1, longer)


def test_a_hit_of_a_ledger_with_other_groups_is_refused():
    one, two = ledger(usable=8), hybrid(8, full(), window(8))
    for manager in (one, two):
        leave(manager, admitted(manager, "a", 10))
    b = request("b", 10)
    assert "has 2 groups and the ledger 1" in refused(one, b, 2, two.get_computed_blocks(b))


def test_a_hit_outlives_the_eviction_of_other_blocks():
    manager = ledger(usable=8)
    leave(manager, admitted(manager, "old", other(8)))
    leave(manager, admitted(manager, "a", 10))
    b = request("b", 10)
    found = manager.get_computed_blocks(b)
    assert free_order(manager) == [5, 6, 7, 8, 2, 1, 4, 3]
    admitted(manager, "x", other(20, family=2))  # takes 5, 6, 7, 8 and evicts 2, of "old"

    assert manager.allocate_slots(b, 2, found) is not None

    assert tables(manager, b) == ([3, 4, 1],)
    manager.check()


def test_a_hit_holds_for_a_request_with_the_same_tokens():
    manager = ledger(usable=8)
    leave(manager, admitted(manager, "a", 10))
    found = manager.get_computed_blocks(request("b", 10))
    c = request("c", 10)
    manager.get_computed_blocks(c)
    assert admit(manager, c, found=found) is not None
    assert tables(manager, c) == ([1, 2, 3],)
    manager.check()


def test_a_state_after_other_tokens_than_the_hit_counts_is_refused():
    manager = hybrid(20, full(), state())
    a = request("a", 9)
    chunks(manager, a)
    leave(manager, a)
    b = request("b", 9)
    found = manager.get_computed_blocks(b)
    assert found.num_tokens == 8
    blocks = found.blocks.blocks
    shorter = PrefixHit(KVCacheBlocks([blocks[0][:1], [blocks[1][-1]]]), 4, -1)
    assert "of group 1 does not cache these tokens" in refused(manager, b, 1, shorter)


LAYOUTS: list[list[KVCacheSpec]] = [
    [full()],
    [window(8)],
    [full(), window(8)],
    [full(8), full(4)],
    [full(), host(30)],
    [window(5), window(8), full()],
]


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_whatever_hit_is_handed_in_whenever_a_request_reads_only_its_own_prefix(layout: int):
    """Random lookups, allocations with old hits of any request, frees, resets, epochs: every block of an accepted hit
    was last written with the very tokens that the request reads there."""
    num_accepted = num_refused = 0
    for seed in range(40):
        accepted, refusals = _random_life(Random(seed), LAYOUTS[layout])
        num_accepted += accepted
        num_refused += refusals
    assert num_accepted > 50
    assert num_refused > 50


def _random_life(random: Random, specs: list[KVCacheSpec]) -> tuple[int, int]:
    manager = hybrid(14 * len(specs), *specs)
    pools = [each.pool for each in manager.coordinator.managers]
    sizes = [each.block_size for each in manager.coordinator.managers]
    # Pool and block id -> whose tokens it holds: salt and all tokens up to the block's end.
    written: dict[tuple[int, int], tuple[str, list[int]]] = {}
    running: list[Request] = []
    hits: list[tuple[Request, PrefixHit]] = []
    num_accepted = num_refused = 0
    for number in range(80):
        action = random.random()
        if action < 0.35:
            length = random.randrange(5, 22)
            salt = random.choice(["", "salt"])
            req = Request(str(number), other(length, family=random.randrange(2)), cache_salt=salt)
            hits.append((req, manager.get_computed_blocks(req)))
        elif action < 0.75 and hits:
            req = random.choice(hits)[0]
            found = next(found for each, found in hits if each is req)
            if random.random() < 0.3:
                found = random.choice(hits)[1]
            if manager.holds_blocks(req) or found.num_tokens >= req.num_tokens:
                continue
            try:
                blocks = manager.allocate_slots(req, req.num_tokens - found.num_tokens, found)
            except RequestError:
                num_refused += 1
                continue
            if blocks is None:
                continue
            req.num_computed_tokens = req.num_tokens
            running.append(req)
            tokens = req.tokens.token_ids(0, req.num_tokens)
            for group, table in enumerate(tables(manager, req)):
                num_hit = found.num_tokens // sizes[group]
                for index, block_id in enumerate(table):
                    content = (req.cache_salt, tokens[: (index + 1) * sizes[group]])
                    key = (id(pools[group]), block_id)
                    if block_id != 0 and index < num_hit:
                        assert written[key] == content
                    elif block_id != 0:
                        written[key] = content
            num_accepted += 1 if found.num_tokens > 0 else 0
        elif action < 0.93 and running:
            leave(manager, running.pop(random.randrange(len(running))))
        elif action < 0.96:
            manager.reset_prefix_cache()
        elif action < 0.98:
            manager.start_epoch()
        manager.check()
    return num_accepted, num_refused
