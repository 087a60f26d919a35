"""What one request of a given length holds, in blocks and bytes."""

from dataclasses import dataclass

from kvledger.sizing.plan import Plan, request_limits
from kvledger.sizing.pool import blocks_of_group, blocks_per_request


@dataclass(frozen=True)
class RequestHolding:
    """One request at its end, in whole blocks. `fixed_bytes`: windows, states and encoder tokens, which do not grow
    with every token; each further token of a long request adds `bytes_per_token`.
    """

    tokens: int
    blocks: int
    bytes: int
    share_of_pool: float
    at_a_time: int
    fixed_bytes: int
    bytes_per_token: float


def request_holding(plan: Plan, tokens: int) -> RequestHolding:
    """What a request of that many tokens, prompt and output together, holds when it ends."""
    limits = request_limits(plan.request.options, plan.settings, tokens)
    blocks = blocks_per_request(plan.layout, limits)
    fixed = sum(blocks_of_group(group, limits) for group in plan.layout.groups if not group.spec.shards_over_context)
    usable = plan.num_blocks - 1
    return RequestHolding(
        tokens,
        blocks,
        blocks * plan.bytes_per_block,
        blocks / usable if usable > 0 else 0.0,
        usable // blocks if blocks else 0,
        fixed * plan.bytes_per_block,
        bytes_per_token(plan),
    )


def bytes_per_token(plan: Plan) -> float:
    """Bytes that each further token of a long request takes: only layers that keep everything grow."""
    ranks = plan.request.options.decode_context_parallel_size
    growing = sum(1 / group.spec.block_size for group in plan.layout.groups if group.spec.shards_over_context)
    return plan.bytes_per_block * growing / ranks
