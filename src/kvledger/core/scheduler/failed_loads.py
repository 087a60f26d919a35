"""Synchronous loads that failed within their step: everybody who computed on what did not arrive starts over.

A load that the step waits for is cached when it is scheduled, like all that the step computes. So when it fails, the
requests of the same step and of the steps behind it may have hit blocks that were never filled, and theirs are hit by
others in turn. All of that leaves the prefix index; what stands before it stays, and is a hit when they start over.
"""

from kvledger.core.ledger.spoiled_blocks import SpoiledBlocks
from kvledger.core.requests.request import Request, RequestStatus
from kvledger.core.scheduler.output import SchedulerOutput
from kvledger.core.scheduler.state import SchedulerState
from kvledger.errors import RequestError


def restart_failed_loads(state: SchedulerState, failed: dict[str, int]) -> list[str]:
    """Restarts the requests of the first step in flight of which only so many tokens have values, and whoever built on
    them. Returns their ids. `failed`: of require_loaded."""
    spoiled = state.manager.spoiled_blocks()
    _add_steps(state.in_flight, failed, spoiled)
    live = _spoiled_holders(state, spoiled)
    spoiled.evict()
    # The last first: each goes to the front of the queue.
    for request in reversed(state.running.copy()):
        if request in live:
            state.preempt(request, drop_stale_output=True)
    for request in reversed(state.waiting_holders.requests()):
        if request in live and request.status is RequestStatus.WAITING_FOR_EXTERNAL_KV:
            state.loads.spoil(request.request_id)
        elif request in live:
            state.restart_holder(request)
    return [request.request_id for request in live]


def require_loaded(output: SchedulerOutput, num_valid_tokens: dict[str, int]) -> dict[str, int]:
    """Those of which something is missing. RequestError for a request that did not start in that step, or a number of
    tokens that it did not start with."""
    started = {data.request_id: data.num_computed_tokens for data in output.new_requests}
    for request_id, num_valid in num_valid_tokens.items():
        num_computed = started.get(request_id, -1)
        if num_computed < 0:
            raise RequestError(f"request {request_id!r} did not start in step {output.step}, so it loaded nothing")
        if not 0 <= num_valid <= num_computed:
            raise RequestError(
                f"num_valid_tokens[{request_id!r}]={num_valid}: it started behind {num_computed} tokens in step "
                f"{output.step}; give how many of them have values"
            )
    return {request_id: num for request_id, num in num_valid_tokens.items() if num < started[request_id]}


def _add_steps(in_flight: list[SchedulerOutput], failed: dict[str, int], spoiled: SpoiledBlocks) -> None:
    """Adds what requests of the steps in flight, gone ones too, computed on spoiled blocks."""
    found: set[str] = set()
    for output in in_flight:
        for data in output.new_requests:
            num_valid = failed.get(data.request_id, -1) if output is in_flight[0] else -1
            if num_valid < 0:
                num_valid = spoiled.num_valid_tokens(data.block_ids)
            if num_valid >= 0:
                spoiled.add_table(data.block_ids, num_valid)
                found.add(data.request_id)
        new = output.new_blocks
        for index, row in enumerate(new.rows):
            if output.request_ids[int(row)] in found:
                spoiled.add(int(new.groups[index]), int(new.positions[index]), int(new.block_ids[index]))


def _spoiled_holders(state: SchedulerState, spoiled: SpoiledBlocks) -> dict[Request, None]:
    """Live requests that hold spoiled blocks, forks and loads under way among them; adds what they have behind them."""
    holders = state.running + state.waiting_holders.requests()
    found: dict[Request, None] = {}
    num_before = -1
    while len(found) > num_before:
        num_before = len(found)
        for request in holders:
            if request not in found:
                block_ids = state.manager.get_block_ids(request.request_id)
                num_valid = spoiled.num_valid_tokens(block_ids)
                if num_valid >= 0:
                    spoiled.add_table(block_ids, num_valid)
                    found[request] = None
    return found
