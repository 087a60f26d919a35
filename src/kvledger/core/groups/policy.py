"""What a group's manager must know of the ledger around it: a GroupPolicy, made by the coordinator, never changed."""

from dataclasses import dataclass, replace

from kvledger.core.record import Record


@dataclass(frozen=True, eq=False, repr=False)
class DraftRule(Record):
    """Speculative decoding with a draft model that keeps KV values of its own (EAGLE, MTP).

    The draft reads `num_lookahead_tokens` tokens behind the one that it computes: 1 for one draft module;
    num_speculative_tokens for several in a row (multi-module MTP), which compute the last tokens anew: nothing that may
    still change is cached. `values_depend_on_next`: its values of a token depend on those tokens (EAGLE, MTP; not
    DFlash), so a hit's last block must be told apart by them, or be dropped and computed again. `hashes_ahead`: the
    former, by a hash that covers them too, or the latter; None: as the release decides. False beside a connector,
    whose store knows blocks by hashes of their own tokens.
    """

    num_lookahead_tokens: int = 1
    values_depend_on_next: bool = True
    hashes_ahead: bool | None = None


@dataclass(frozen=True)
class GroupPolicy:
    """The same for all groups of a ledger, but for is_draft, the most blocks and, without caching, the sizes.

    `hash_block_size`: tokens under one block hash. `hit_alignment`: hits end at its multiples. `base_block_size`: a
    common multiple of all block sizes. `hits_inside_blocks`: hits may end at any hash unit. `is_draft`: the last block
    of this group's hits is dropped; `any_draft`: of some group's. `num_unsettled`: tokens at the end of what is
    computed whose values may still change. `num_draft_lookahead`: known tokens that the draft needs behind a prefill
    step, 0 without one. `num_hash_lookahead`: tokens behind a block that its hash covers as well.
    `keeps_block_below_junction`, `recaches_hit_states`, `delays_renamed_states`: rules of the release (decisions.py).
    `retention_interval`: sparse groups keep a reusable tail once in so many tokens; 0 only where a prompt's replay can
    use it; -1 at every aligned boundary. `max_admission_blocks`: most blocks that one request holds at a time;
    `max_step_blocks`: with no more than one step in flight, lookahead included. `context_parallel_size`: ranks over
    which each block's tokens are spread, where the spec allows it. `pins_shared_prefix`: states are cached exactly
    where a shared prefix ends.
    """

    hash_block_size: int
    hit_alignment: int
    base_block_size: int
    hits_inside_blocks: bool = False
    is_draft: bool = False
    any_draft: bool = False
    num_unsettled: int = 0
    num_draft_lookahead: int = 0
    num_hash_lookahead: int = 0
    keeps_block_below_junction: bool = False
    recaches_hit_states: bool = True
    delays_renamed_states: bool = False
    retention_interval: int = -1
    max_admission_blocks: int = 0
    max_step_blocks: int = 0
    context_parallel_size: int = 1
    pins_shared_prefix: bool = False

    def with_most_blocks(self, max_admission_blocks: int, max_step_blocks: int) -> "GroupPolicy":
        """The same policy for an engine whose steps make these the most blocks of a request."""
        return replace(self, max_admission_blocks=max_admission_blocks, max_step_blocks=max_step_blocks)
