"""What crosses the ledger's door: blocks per group, a prefix hit, an admission rule, what a group has."""

from typing import Final

from mypy_extensions import i64, mypyc_attr

from kvledger.core.blocks.block import KVCacheBlock
from kvledger.core.record import Record, refuse_copy


@mypyc_attr(acyclic=True)
class KVCacheBlocks:
    """blocks[group][i]: the i-th block of a request (or of one call's new blocks) in that KV cache group. Read only."""

    def __init__(self, blocks: list[list[KVCacheBlock]]) -> None:
        self.blocks: Final = blocks

    def __reduce__(self) -> tuple[object, ...]:
        raise refuse_copy(self, "send get_block_ids()")

    def __repr__(self) -> str:
        return f"KVCacheBlocks{self.get_block_ids()}"

    def is_empty(self) -> bool:
        return all(not group for group in self.blocks)

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids per group, in fresh lists that the caller may keep and extend."""
        return tuple([int(block.block_id) for block in group] for group in self.blocks)


@mypyc_attr(acyclic=True)
class PrefixHit:
    """What the prefix cache has of a request. allocate_slots refuses one whose blocks cache something else by then.

    `limiting_group`: the group for whose sake it is not longer; -1 when none had less than the lookup's limit.
    `limited_end`: where the tokens end that other groups have cached and that one has not, or only a part of one of its
    larger blocks; 0 if none have more. `shared_prefix_boundary`: where a longer prefix ends, a possible hit, that other
    groups have cached and a sparse one (windows, states) has not; 0 if there is none. Worth caching there when the
    request gets to it. `age`: the coordinator's age() when it was found; `hashes`: the list of hashes that it was found
    by. While both are the same, the hit needs no second look.
    """

    def __init__(
        self,
        blocks: KVCacheBlocks,
        num_tokens: int,
        limiting_group: int,
        shared_prefix_boundary: int = 0,
        limited_end: int = 0,
        age: i64 = -1,
        hashes: list[bytes] | None = None,
    ) -> None:
        self.blocks: Final = blocks
        self.num_tokens: Final = num_tokens
        self.limiting_group: Final = limiting_group
        self.shared_prefix_boundary: Final = shared_prefix_boundary
        self.limited_end: Final = limited_end
        self.age: Final[i64] = age
        self.hashes: Final = hashes

    def __reduce__(self) -> tuple[object, ...]:
        raise refuse_copy(self, "send num_tokens, or blocks.get_block_ids()")

    def __repr__(self) -> str:
        return f"PrefixHit({self.num_tokens} tokens, {self.blocks!r}, limiting_group={self.limiting_group})"

    def with_blocks(self, blocks: list[list[KVCacheBlock]], num_tokens: int) -> "PrefixHit":
        """The same find with fewer blocks, for so many of its tokens."""
        return PrefixHit(
            KVCacheBlocks(blocks),
            num_tokens,
            self.limiting_group,
            self.shared_prefix_boundary,
            self.limited_end,
            self.age,
            self.hashes,
        )


@mypyc_attr(acyclic=True)
class AdmissionRule(Record):
    """What allocate_slots asks of a request that is not running yet.

    `full_sequence_must_fit`: all its tokens must fit now, not only this step's chunk, or prefills that were let in one
    chunk at a time preempt each other for ever (vllm-project/vllm#37307). `reserved_blocks`: free blocks that other
    requests in flight count on. `has_scheduled_requests`: others run, so the watermark applies.
    """

    __match_args__ = ("full_sequence_must_fit", "reserved_blocks", "has_scheduled_requests")

    def __init__(
        self, full_sequence_must_fit: bool = True, reserved_blocks: int = 0, has_scheduled_requests: bool = True
    ) -> None:
        self.full_sequence_must_fit: Final = full_sequence_must_fit
        self.reserved_blocks: Final = reserved_blocks
        self.has_scheduled_requests: Final = has_scheduled_requests


@mypyc_attr(acyclic=True)
class BlockShortage(Record):
    """Why allocate_slots returned None: num_needed + num_watermark > num_free - num_reserved, in blocks.

    `is_whole_sequence`: the blocks were counted for all tokens of the request (AdmissionRule.full_sequence_must_fit),
    not only for those of the step. `is_host_pool`: the pool of a group in host memory has too few. `is_beside_loads`:
    num_free are those that other loads would leave, even if nothing else were held. `is_in_writing`: not in this step,
    which itself writes the hit. `never_fits`: with this hit, if any, it would not fit a pool of its own either.
    """

    __match_args__ = (
        "request_id",
        "num_needed",
        "num_free",
        "num_watermark",
        "num_reserved",
        "is_whole_sequence",
        "is_host_pool",
        "is_beside_loads",
        "is_in_writing",
        "never_fits",
    )

    def __init__(
        self,
        request_id: str,
        num_needed: int,
        num_free: int,
        num_watermark: int = 0,
        num_reserved: int = 0,
        is_whole_sequence: bool = False,
        is_host_pool: bool = False,
        is_beside_loads: bool = False,
        is_in_writing: bool = False,
        never_fits: bool = False,
    ) -> None:
        self.request_id: Final = request_id
        self.num_needed: Final = num_needed
        self.num_free: Final = num_free
        self.num_watermark: Final = num_watermark
        self.num_reserved: Final = num_reserved
        self.is_whole_sequence: Final = is_whole_sequence
        self.is_host_pool: Final = is_host_pool
        self.is_beside_loads: Final = is_beside_loads
        self.is_in_writing: Final = is_in_writing
        self.never_fits: Final = never_fits

    def __str__(self) -> str:
        blocks = "block" if self.num_needed == 1 else "blocks"
        what = "all its tokens" if self.is_whole_sequence else "the step"
        if self.is_in_writing:
            return f"needs a prefix hit for {what} that this step writes"
        if self.is_host_pool:
            return f"needs more blocks for {what} than are free in host memory"
        whose = "left by other loads" if self.is_beside_loads else "free"
        text = f"needs {self.num_needed} {blocks} for {what}, {self.num_free} {whose}"
        if self.num_watermark > 0:
            text += f", watermark {self.num_watermark}"
        if self.num_reserved > 0:
            text += f", {self.num_reserved} spoken for"
        return text


@mypyc_attr(acyclic=True)
class GroupOccupancy(Record):
    """One group at a moment. `num_held`: blocks that requests hold, shared ones once; `num_null`: entries of their
    tables that hold none, because their tokens are read no more; `num_cached`: different prefixes that can be hit.
    """

    __match_args__ = ("num_held", "num_null", "num_cached")

    def __init__(self, num_held: int, num_null: int, num_cached: int) -> None:
        self.num_held: Final = num_held
        self.num_null: Final = num_null
        self.num_cached: Final = num_cached
