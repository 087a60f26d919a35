"""A ledger in random use: requests that share prefixes come, grow, leave and are preempted; blocks are evicted."""

import random

from kvledger import Adapter, KVCacheManager, Request

MAX_TOKENS = 120
ADAPTERS = (None, None, None, Adapter("law", 1), Adapter("code", 2))
SALTS = ("", "", "", "tenant")


class RandomLife:
    """`act` does one thing. Everything runs in small steps, so that blocks become full in many ways."""

    def __init__(
        self,
        manager: KVCacheManager,
        rng: random.Random,
        *,
        num_texts: int = 6,
        evicts: bool = True,
        salts: tuple[str, ...] = SALTS,
    ) -> None:
        self.manager = manager
        self.rng = rng
        self.salts = salts
        self.texts = [[rng.randrange(1000) for _ in range(MAX_TOKENS)] for _ in range(num_texts)]
        self.running: list[Request] = []
        self.actions = [self.admit, self.admit, self.leave, *[self.compute] * 5]
        self.rare_actions = [self.reset, self.evict] if evicts else [self.reset]
        self.num_made = 0

    def act(self) -> None:
        rng = self.rng
        rng.choice(self.rare_actions if rng.random() < 0.01 else self.actions)()

    def admit(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.texts)[: rng.randint(1, 60)]
        if rng.random() < 0.3:
            prompt = prompt + [rng.randrange(1000) for _ in range(rng.randint(1, 12))]
        self.num_made += 1
        request = Request(str(self.num_made), prompt, adapter=rng.choice(ADAPTERS), cache_salt=rng.choice(self.salts))
        self.manager.start_step()
        hit = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        num_new = self._chunk(request, hit.num_tokens)
        if num_new > 0 and self.manager.allocate_slots(request, num_new, hit) is not None:
            self._settle_copies()
            request.num_computed_tokens = hit.num_tokens + num_new
            self.running.append(request)

    def compute(self) -> None:
        if not self.running:
            return
        request = self.rng.choice(self.running)
        if request.num_tokens >= MAX_TOKENS:
            self._free(request)
            return
        if request.num_computed_tokens == request.num_tokens:
            request.append_token(self.rng.randrange(1000))
        self.manager.start_step()
        num_new = self._chunk(request, request.num_computed_tokens)
        if num_new == 0:
            return
        if self.manager.allocate_slots(request, num_new) is None:
            self._free(request)
            return
        self._settle_copies()
        request.num_computed_tokens += num_new

    def leave(self) -> None:
        if self.running:
            self._free(self.rng.choice(self.running))

    def reset(self) -> None:
        for request in [*self.running]:
            self._free(request)
        assert self.manager.reset_prefix_cache()

    def evict(self) -> None:
        self.manager.evict_blocks([self.rng.randint(1, self.manager.num_usable_blocks) for _ in range(3)])

    def cached_keys(self) -> set[tuple[int, bytes]]:
        """(group id, hash) of everything in the prefix index."""
        return {
            (group.group_id, block_hash)
            for group in self.manager._coordinator.managers
            for block_hash in group.pool.indexes[group.group_id].blocks()
        }

    def _chunk(self, request: Request, start: int) -> int:
        num_new = min(self.rng.choice([1, 5, 16, 64]), request.num_tokens - start)
        return self.manager.clip_chunk(request, start, num_new, 64)

    def _settle_copies(self) -> None:
        self.manager.release_block_copies(self.manager.take_block_copies())

    def _free(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request)
