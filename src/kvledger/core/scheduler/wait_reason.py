"""Why a request got no tokens in a step: a fixed vocabulary, and one explanation with its numbers."""

from dataclasses import dataclass
from enum import Enum

from kvledger.core.blocks.kv_cache_blocks import BlockShortage
from kvledger.core.record import Record


class WaitReason(Enum):
    """Why one request got nothing. Some reasons also end a pass, so that nobody behind was looked at:

    - TOKEN_BUDGET, MAX_NUM_SEQS, STEP_PREEMPTED: shared by everybody whom the pass did not come to.
    - BLOCKS, HIT_IN_WRITING, CHUNK_CLIPPED, WHOLE_PROMPT, PADDED_DECODE: of a waiting request that could not start.
      Everybody behind it has BEHIND. (A running request that is CHUNK_CLIPPED stops nobody.)
    - BLOCKS_IN_FLIGHT: of a running request that could not go on; the running ones behind it have BEHIND.

    All others are about that request alone: the pass goes on with the next.
    """

    TOKEN_BUDGET = "token budget spent"
    MAX_NUM_SEQS = "max_num_seqs reached"
    BLOCKS = "not enough free blocks"
    BLOCKS_IN_FLIGHT = "the blocks that it needs may still be written by a step in flight"
    HIT_IN_WRITING = "its prefix hit is written by this very step"
    BEHIND = "behind a request that does not fit"
    STEP_PREEMPTED = "a step that preempts admits nobody"
    PREEMPTED = "preempted"
    CHUNK_CLIPPED = "budget left is too small for a chunk that can be cached"
    WHOLE_PROMPT = "budget left is too small for the whole prompt"
    PADDED_DECODE = "budget left is too small for a decode padded with drafts"
    EXTERNAL_LOOKUP = "external source does not know yet"
    EXTERNAL_LOAD = "waiting for external KV"
    STALE_OUTPUT = "output from before its preemption is in flight"
    OUTPUT_IN_FLIGHT = "nothing to compute before a step in flight is back"
    NOT_CONSIDERED = "the last step did not come to it"
    NEVER_FITS = "larger than the whole pool"


@dataclass(frozen=True, eq=False, repr=False)
class WaitExplanation(Record):
    """Why request_id got no tokens in step `step`, as that step decided it.

    `since_step`: the first step that passed it over since it came, ran, or was preempted. `num_ahead`: requests that
    are considered before it. Set as the reason has it: `other_id`: the request that it is behind, or that preempted it
    (PREEMPTED) or was preempted (STEP_PREEMPTED), and `other_reason`, why that one waits; `shortage`: the blocks, of
    this request or of the one it is behind; `num_blocks_orphaned`: blocks now held for aborted requests whose load has
    not reported, and `lease_ends_step`, which takes them back (0: no lease); `num_tokens`: what it wanted of a budget,
    or is being loaded; `limit`: what was left of that, or the limit that was reached (tokens, or requests);
    `load_since_step`: the step that asked for its external KV; `error`: of a request that can never fit.
    """

    request_id: str
    reason: WaitReason
    step: int
    since_step: int
    num_ahead: int = 0
    other_id: str = ""
    other_reason: WaitReason | None = None
    shortage: BlockShortage | None = None
    num_blocks_orphaned: int = 0
    lease_ends_step: int = 0
    num_tokens: int = 0
    limit: int = 0
    load_since_step: int = 0
    error: str = ""

    @property
    def num_steps(self) -> int:
        """Steps that have passed it over in a row."""
        return max(0, self.step - self.since_step + 1)

    def __str__(self) -> str:
        since = f"since step {self.since_step} ({self.num_steps} steps)" if self.num_steps > 1 else ""
        return f"{self.request_id!r} waits {since}: {self._text()}".replace("waits :", "waits:")

    def _text(self) -> str:
        """The reason with its numbers."""
        reason = self.reason
        text = reason.value
        if reason is WaitReason.BLOCKS:
            return self._blocks_text()
        if reason is WaitReason.BLOCKS_IN_FLIGHT:
            return f"{text}; it {self.shortage}"
        if reason is WaitReason.TOKEN_BUDGET:
            return f"{text}: all {self.limit} tokens" + self._line_text()
        if reason is WaitReason.MAX_NUM_SEQS:
            return f"{text}: {self.limit} requests run" + self._line_text()
        if reason is WaitReason.BEHIND:
            why = self._blocks_text() if self.shortage is not None else self._other_text()
            return f"behind {self.other_id!r} ({why})" + self._line_text()
        if reason is WaitReason.STEP_PREEMPTED:
            return f"{text}: {self.other_id!r} was preempted" + self._line_text()
        if reason is WaitReason.PREEMPTED:
            who = "itself" if self.other_id == self.request_id else f"{self.other_id!r}"
            return f"{text} by {who}, which {self.shortage}"
        if reason is WaitReason.EXTERNAL_LOAD:
            return f"{text} since step {self.load_since_step}: {self.num_tokens} tokens"
        if self.num_tokens > 0:
            return f"{text}: {self.num_tokens} tokens, {self.limit} left"
        return f"{text}: {self.error}" if self.error else text

    def _blocks_text(self) -> str:
        if self.num_blocks_orphaned == 0:
            return str(self.shortage)
        lease = f" until step {self.lease_ends_step}" if self.lease_ends_step > 0 else ""
        return f"{self.shortage}, {self.num_blocks_orphaned} held by orphaned loads{lease}"

    def _other_text(self) -> str:
        return "" if self.other_reason is None else self.other_reason.value

    def _line_text(self) -> str:
        ahead = f", {self.num_ahead} ahead of it" if self.num_ahead > 0 else ""
        return f"{ahead}, external KV asked for in step {self.load_since_step}" if self.load_since_step > 0 else ahead
