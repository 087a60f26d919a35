"""A random life of a ledger that explains its misses, compared with an explanation by a model without any cleverness:
a dictionary of every hash that was ever evicted, and a list of prompts."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvledger import EvictionCause, KVCacheBlock, KVCacheManager, LedgerObserver, MissExplainer, PromptAccount, Request
from kvledger.core.watch.content_twins import MAX_ALIKE
from tests.conftest import LONG
from tests.helpers import kv_config, pool_of

BLOCK = 4
PICK = st.integers(0, 99)
PROMPTS = st.builds(
    lambda shared, own, family: list(range(shared)) + [1000 * family + n for n in range(own)],
    st.integers(0, 28),
    st.integers(1, 12),
    st.integers(1, 3),
)
PARTS_BY_CAUSE = {
    EvictionCause.EVICTED: "evicted_by_call",
    EvictionCause.RESET: "reset",
    EvictionCause.PROMOTED: "promoted",
}


class Diary(LedgerObserver):
    """Everything that was ever evicted: hash -> (number of the eviction, cause), the last time."""

    def __init__(self) -> None:
        self.evicted: dict[bytes, tuple[int, EvictionCause]] = {}
        self.num_evictions = 0

    def blocks_evicted(self, blocks: list[KVCacheBlock], cause: EvictionCause) -> None:
        for block in blocks:
            assert block.block_hash is not None
            self.evicted[block.block_hash] = (self.num_evictions, cause)
            self.num_evictions += cause is EvictionCause.REUSED

    def prefix_cache_reset(self) -> None:
        self.evicted = {key: (number, EvictionCause.RESET) for key, (number, _) in self.evicted.items()}


class MissMachine(RuleBasedStateMachine):
    @initialize(usable=st.integers(3, 24))
    def build(self, usable: int) -> None:
        self.diary = Diary()
        self.manager = KVCacheManager(kv_config(usable), 64, observer=self.diary)
        self.misses = MissExplainer(self.manager)
        self.held: list[Request] = []
        self.known: list[tuple[list[int], str, int, list[bytes]]] = []
        self.num_made = 0
        self.num_queries = self.num_hits = 0

    @rule(
        prompt=PROMPTS,
        salt=st.sampled_from(["", "", "", "salt"]),
        chunk=st.integers(1, 40),
        external=st.sampled_from([0, 0, 0, 5, 8]),
        skips=st.sampled_from([False, False, False, False, True]),
    )
    def arrive(self, prompt: list[int], salt: str, chunk: int, external: int, skips: bool) -> None:
        self.num_made += 1
        request = Request(str(self.num_made), prompt, cache_salt=salt, skip_prefix_lookup=skips)
        manager = self.manager
        hit = manager.get_computed_blocks(request)
        external = min(external, request.num_tokens - 1 - hit.num_tokens)
        manager._hashes.refresh(request)
        expected = self.explained(request, hit.num_tokens, external)
        num_new = min(chunk, request.num_tokens - hit.num_tokens - external)
        blocks = manager.allocate_slots(request, num_new, hit, num_external_computed_tokens=external)
        if blocks is None:
            return
        account = self.misses.recent()[-1]
        assert account.request_id == request.request_id
        split = {name: number for name, number in account.split.as_dict().items() if number}
        assert (split, account.num_blocks_short) == expected
        self.remember(request)
        manager.record_prefix_lookup(request, hit.num_tokens, hit)
        request.num_computed_tokens = hit.num_tokens + external + num_new
        self.held.append(request)
        self.count(account)

    def explained(self, request: Request, num_hit: int, num_external: int) -> tuple[dict[str, int], int]:
        """The parts that are not 0, and the blocks that the pool was short of."""
        num_tokens = request.num_tokens
        index = pool_of(self.manager).indexes[0]
        parts: dict[str, int] = {"hit": num_hit, "external": num_external}
        position = num_hit + num_external
        if request.skip_prefix_lookup:
            parts["lookup_off"] = num_tokens - position
            return {name: number for name, number in parts.items() if number}, 0
        limit = (num_tokens - 1) // BLOCK * BLOCK
        most = short = 0
        cause = EvictionCause.REUSED
        twin_start = position // BLOCK
        for block in range(num_hit // BLOCK, limit // BLOCK):
            name = request.block_hashes[block]
            end = (block + 1) * BLOCK
            if index.get(name) is None:
                if name not in self.diary.evicted:
                    break
                number, why = self.diary.evicted[name]
                if why is EvictionCause.REUSED:
                    most = max(most, self.diary.num_evictions - number)
                elif cause is EvictionCause.REUSED:
                    cause = why
            if end > position:
                part = PARTS_BY_CAUSE.get(cause, "evicted")
                parts[part] = parts.get(part, 0) + end - position
                position = end
                twin_start = block + 1
                if cause is EvictionCause.REUSED:
                    short = most
        twin_end, kind = 0, ""
        alike = [known for known in self.known if known[0][:BLOCK] == request_tokens(request)[:BLOCK]][-MAX_ALIKE:]
        for tokens, salt, epoch, hashes in alike:
            if (salt, epoch) == (request.cache_salt, request.hash_epoch):
                continue
            end = self.twin_blocks(request, tokens, hashes, twin_start) * BLOCK
            if end > twin_end:
                twin_end, kind = end, "other_salt" if salt != request.cache_salt else "other_epoch"
        if min(twin_end, limit) > position:
            parts[kind] = min(twin_end, limit) - position
            position = min(twin_end, limit)
        parts["never_seen"] = max(0, limit - position)
        position = max(position, limit)
        parts["last_token_rule" if num_tokens % BLOCK == 0 else "shorter_than_block"] = num_tokens - position
        return {name: number for name, number in parts.items() if number}, short

    def twin_blocks(self, request: Request, tokens: list[int], hashes: list[bytes], start: int) -> int:
        """Blocks from the sequence's start that have the same tokens; from `start` on they must be cached."""
        own = request_tokens(request)
        block = 0
        while (block + 1) * BLOCK <= min(len(own), len(tokens)):
            span = slice(block * BLOCK, (block + 1) * BLOCK)
            if own[span] != tokens[span]:
                break
            if block >= start and pool_of(self.manager).indexes[0].get(hashes[block]) is None:
                break
            block += 1
        return block

    def remember(self, request: Request) -> None:
        if request.num_tokens >= BLOCK and not request.skip_prefix_lookup:
            self.known.append(
                (request_tokens(request), request.cache_salt, request.hash_epoch, list(request.block_hashes))
            )

    def count(self, account: PromptAccount) -> None:
        assert account.split.num_tokens() == account.num_tokens
        if not account.split.lookup_off:
            self.num_queries += account.num_tokens
            self.num_hits += account.split.hit

    @precondition(lambda self: self.held)
    @rule(number=PICK, num_tokens=st.integers(1, 9), family=st.integers(1, 2))
    def go_on(self, number: int, num_tokens: int, family: int) -> None:
        """The rest of the prompt, then generated tokens, which may be the same for many."""
        request = self.held[number % len(self.held)]
        for step in range(num_tokens):
            if request.num_computed_tokens == request.num_tokens:
                if request.num_tokens == 60:
                    return
                request.append_token(5000 * family + step)
            if self.manager.allocate_slots(request, 1) is None:
                return
            request.num_computed_tokens += 1

    @precondition(lambda self: self.held)
    @rule(number=PICK)
    def leave(self, number: int) -> None:
        self.manager.free(self.held.pop(number % len(self.held)))

    @rule(block_ids=st.lists(st.integers(1, 24), max_size=3))
    def evict(self, block_ids: list[int]) -> None:
        self.manager.evict_blocks([block_id for block_id in block_ids if block_id < pool_of(self.manager).num_blocks])

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @precondition(lambda self: not self.held)
    @rule()
    def start_epoch(self) -> None:
        self.manager.start_epoch()

    @invariant()
    def sums_hold(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        misses = self.misses
        total = misses.new
        assert total.split.num_tokens() == total.num_tokens
        assert (total.num_tokens - total.split.lookup_off, total.split.hit) == (self.num_queries, self.num_hits) or (
            total.split.lookup_off > 0
        )
        assert sum(total.tokens_kept_by) == total.split.evicted
        assert misses.num_evictions == self.diary.num_evictions


def request_tokens(request: Request) -> list[int]:
    return request.tokens.token_ids(0, request.num_tokens)


TestMissMachine = MissMachine.TestCase
TestMissMachine.settings = settings(max_examples=100 * LONG, stateful_step_count=60)
