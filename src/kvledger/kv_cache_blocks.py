"""What crosses the ledger's door: blocks per group, a prefix hit, an admission rule, a copy order."""

from typing import Final

from mypy_extensions import mypyc_attr

from kvledger.block import KVCacheBlock


@mypyc_attr(acyclic=True)
class KVCacheBlocks:
    """blocks[group][i]: the i-th block of a request (or of one call's new blocks) in that KV cache group. Read only."""

    def __init__(self, blocks: list[list[KVCacheBlock]]) -> None:
        self.blocks: Final = blocks

    def is_empty(self) -> bool:
        return all(not group for group in self.blocks)

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids per group, in fresh lists that the caller may keep and extend."""
        return tuple([int(block.block_id) for block in group] for group in self.blocks)


@mypyc_attr(acyclic=True)
class PrefixHit:
    """What the prefix cache has of a request. Valid until the next call that changes the ledger."""

    def __init__(self, blocks: KVCacheBlocks, num_tokens: int) -> None:
        self.blocks: Final = blocks
        self.num_tokens: Final = num_tokens


@mypyc_attr(acyclic=True)
class AdmissionRule:
    """What allocate_slots asks of a request that is not running yet.

    `full_sequence_must_fit`: all its tokens must fit now, not only this step's chunk, or prefills that were let in one
    chunk at a time preempt each other for ever (vllm-project/vllm#37307). `reserved_blocks`: free blocks that other
    requests in flight count on. `has_scheduled_requests`: others run, so the watermark applies.
    """

    def __init__(
        self, full_sequence_must_fit: bool = True, reserved_blocks: int = 0, has_scheduled_requests: bool = True
    ) -> None:
        self.full_sequence_must_fit: Final = full_sequence_must_fit
        self.reserved_blocks: Final = reserved_blocks
        self.has_scheduled_requests: Final = has_scheduled_requests


@mypyc_attr(acyclic=True)
class BlockCopy:
    """Order to the worker: copy block source to block target in that group, before the step computes.

    Both blocks are kept from reuse until release_block_copies.
    """

    def __init__(self, group_id: int, source: KVCacheBlock, target: KVCacheBlock) -> None:
        self.group_id: Final = group_id
        self.source: Final = source
        self.target: Final = target

    @property
    def source_block_id(self) -> int:
        return self.source.block_id

    @property
    def target_block_id(self) -> int:
        return self.target.block_id
