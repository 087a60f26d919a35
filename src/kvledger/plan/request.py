"""What one request of a given length holds, in blocks and bytes."""

from dataclasses import dataclass, replace

from kvledger.plan.engine import concurrent_batches
from kvledger.plan.plan import Plan, request_limits
from kvledger.plan.pool import blocks_of_group, blocks_per_request


@dataclass(frozen=True)
class RequestHolding:
    """One request while it decodes its last token, in whole blocks.

    `peak_blocks`: the most that it holds at any time; more than `blocks` where a window still keeps the prompt's tokens
    that are in flight. `fixed_bytes`: windows, states and encoder tokens, which do not grow with every token; each
    further token of a long request adds `bytes_per_token`.
    """

    tokens: int
    blocks: int
    peak_blocks: int
    bytes: int
    share_of_pool: float
    at_a_time: int
    fixed_bytes: int
    bytes_per_token: float


def request_holding(plan: Plan, prompt: int, output: int) -> RequestHolding:
    """What a request of that many tokens holds when it ends, and at most."""
    tokens, options = prompt + output, plan.request.options
    reading = request_limits(options, plan.settings, prompt)
    # A decoding request has one token in each batch that is in flight.
    limits = replace(reading, max_model_len=tokens, max_in_flight_tokens=concurrent_batches(options))
    blocks = blocks_per_request(plan.layout.groups, limits)
    fixed = sum(blocks_of_group(group, limits) for group in plan.layout.groups if not group.spec.shards_over_context)
    usable = plan.num_blocks - 1
    return RequestHolding(
        tokens,
        blocks,
        max(blocks, blocks_per_request(plan.layout.groups, reading)),
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
