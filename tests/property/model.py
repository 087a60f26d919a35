"""The ledger as one would write it on paper: lists and dicts, no hashes, no links, nothing shared with the real one."""

from collections.abc import Iterable

from kvledger import AdmissionRule, Request

# What a cached block is known by: (epoch, salt, all tokens up to its end).
Content = tuple[int, str, tuple[int, ...]]


def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


class Model:
    def __init__(self, usable: int, block_size: int, max_model_len: int, caching: bool, watermark_blocks: int) -> None:
        self.block_size, self.max_model_len, self.caching = block_size, max_model_len, caching
        self.watermark_blocks = watermark_blocks
        self.free_order = list(range(1, usable + 1))
        self.ref_cnt = dict.fromkeys(self.free_order, 0)
        self.index: dict[Content, list[int]] = {}  # content -> its blocks, first one first
        self.content: dict[int, Content] = {}
        self.tables: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}
        self.epoch = 0
        self.epochs: dict[str, int] = {}

    def name(self, req: Request, num_blocks: int, epoch: int) -> Content:
        return epoch, req.cache_salt, tuple(req.tokens.token_ids(0, num_blocks * self.block_size))

    def lookup(self, req: Request) -> list[int]:
        hit: list[int] = []
        while self.caching and (len(hit) + 1) * self.block_size <= req.num_tokens - 1:
            blocks = self.index.get(self.name(req, len(hit) + 1, self.epoch))
            if blocks is None:
                break
            hit.append(blocks[0])
        return hit

    def allocate(
        self,
        req: Request,
        num_new: int,
        hit: list[int],
        lookahead: int = 0,
        external: int = 0,
        delay: bool = False,
        rule: AdmissionRule | None = None,
    ) -> list[int] | None:
        held = self.tables.get(req.request_id, [])
        computed_end = min(req.num_computed_tokens + len(hit) * self.block_size + external, self.max_model_len)
        slots_end = min(computed_end + num_new + lookahead, self.max_model_len)
        num_free = len(self.free_order)
        if rule is not None:
            watermark = self.watermark_blocks if rule.has_scheduled_requests else 0
            full = self._needed(min(req.num_tokens, self.max_model_len), held, hit) + watermark
            if rule.full_sequence_must_fit and full > num_free:
                return None
            num_free -= rule.reserved_blocks + watermark
        if self._needed(slots_end, held, hit) > num_free:
            return None
        if req.request_id not in self.tables:
            self.tables[req.request_id], self.num_cached[req.request_id] = held, len(hit)
            self.epochs[req.request_id] = self.epoch
            self.share(hit)
            held.extend(hit)
        if external:
            self._take(held, computed_end)
        num_before = len(held)
        self._take(held, slots_end)
        if not delay:
            self.cache(req, min(computed_end + num_new, req.num_tokens))
        return held[num_before:]

    def cache(self, req: Request, num_tokens: int) -> None:
        for position in range(self.num_cached[req.request_id], num_tokens // self.block_size if self.caching else 0):
            self.num_cached[req.request_id] = position + 1
            name = self.name(req, position + 1, self.epochs[req.request_id])
            block = self.tables[req.request_id][position]
            if block not in self.content:  # else a fork that shares it was first
                self.content[block] = name
                self.index.setdefault(name, []).append(block)

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.ref_cnt[block] == 0:
                self.free_order.remove(block)
            self.ref_cnt[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """In the order of reuse: those that cache nothing to the front, the others to the end."""
        gone: list[int] = []
        for block in blocks:
            self.ref_cnt[block] -= 1
            gone += [block] if self.ref_cnt[block] == 0 else []
        plain = [block for block in gone if block not in self.content]
        self.free_order = plain + self.free_order + [block for block in gone if block in self.content]

    def leave(self, req: Request) -> None:
        self.release(reversed(self.tables.pop(req.request_id)))

    def fork(self, parent: Request, child: Request, num_tokens: int) -> tuple[int, int] | None:
        """The (source, target) of the copy, if there is one. REQUIRES that it fits."""
        num_full = num_tokens // self.block_size
        table = self.tables[parent.request_id]
        shared = table[:num_full]
        self.share(shared)
        self.tables[child.request_id] = shared
        self.num_cached[child.request_id] = min(self.num_cached[parent.request_id], num_full)
        self.epochs[child.request_id] = self.epochs[parent.request_id]
        if num_tokens % self.block_size == 0:
            return None
        self._take(shared, num_tokens)
        self.share([table[num_full], shared[-1]])
        return table[num_full], shared[-1]

    def evict(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            name = self.content.pop(block, None)
            if name is not None:
                self.index[name].remove(block)
                if not self.index[name]:
                    del self.index[name]

    def _needed(self, num_slots: int, held: list[int], hit: list[int]) -> int:
        missing = max(0, cdiv(num_slots, self.block_size) - len(held) - len(hit))
        return missing + sum(self.ref_cnt[block] == 0 for block in hit)

    def _take(self, held: list[int], num_slots: int) -> None:
        while len(held) < cdiv(num_slots, self.block_size):
            block = self.free_order[0]
            self.share([block])
            self.evict([block])
            held.append(block)
