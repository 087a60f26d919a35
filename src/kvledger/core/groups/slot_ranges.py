"""The half-open token ranges of one allocate_slots call, computed once and read by every layer below.

A running request's are written into one object that is used again for the next: nobody may keep it beyond the call.

    | computed | new_computed | external_computed |  new  | lookahead |
    0          ^ held already  ^ local_end         ^ computed_end      ^ slots_end
                                                          ^ new_end

computed           counted in request.num_computed_tokens: blocks are held already
new_computed       this call's prefix hit in the local cache: blocks exist, references are added
external_computed  a connector delivers the values: blocks are taken, nothing is computed
new                computed in this step, unverified drafts included
lookahead          slots that a drafter writes beyond them
"""

from typing import Final

from mypy_extensions import i64, mypyc_attr

from kvledger.core.requests.request import Request


@mypyc_attr(acyclic=True)
class SlotRanges:
    """Positions in tokens from the start of the sequence.

    `is_gate`: these are not the ranges of a step but of the whole sequence, to see whether it would fit. `prefill_end`:
    where the known tokens end that must be computed before the first new token can be sampled. `resume_end`: where
    computing goes on (default: computed_end). That is one token lower when all known tokens are external, because the
    logits of the last one are needed; what it reads must be kept.
    """

    def __init__(
        self,
        local_end: i64 = 0,
        computed_end: i64 = 0,
        new_end: i64 = 0,
        slots_end: i64 = 0,
        num_encoder_tokens: i64 = 0,
        prefill_end: i64 = 0,
        is_gate: bool = False,
        resume_end: i64 = -1,
    ) -> None:
        self.local_end: i64 = local_end
        # Not capped to max_model_len: the cache may know more than the model takes.
        self.computed_end: i64 = computed_end
        self.new_end: i64 = new_end
        self.slots_end: i64 = slots_end
        self.num_encoder_tokens: i64 = num_encoder_tokens
        self.prefill_end: i64 = prefill_end
        self.is_gate: Final = is_gate
        self.resume_end: i64 = computed_end if resume_end < 0 else resume_end

    @property
    def num_external(self) -> i64:
        return self.computed_end - self.local_end

    def be_growth(self, request: Request, new_end: i64, slots_end: i64) -> None:
        """Makes these the ranges of a running request's next step. REQUIRES an object made without arguments."""
        computed_end: i64 = request.num_computed_tokens
        self.local_end = computed_end
        self.computed_end = computed_end
        self.resume_end = computed_end
        self.new_end = new_end
        self.slots_end = slots_end
        self.num_encoder_tokens = request.num_encoder_tokens
        self.prefill_end = _prefill_end(request)

    def whole_sequence(self, request: Request, max_model_len: int) -> "SlotRanges":
        """All of the request's tokens behind the same computed ones, as a gate."""
        end = min(request.num_tokens, max_model_len)
        computed_end = min(self.computed_end, max_model_len)
        return SlotRanges(
            self.local_end,
            computed_end,
            end,
            end,
            self.num_encoder_tokens,
            self.prefill_end,
            is_gate=True,
            resume_end=min(self.resume_end, computed_end),
        )


def sequence_ranges(
    num_tokens: int, num_encoder_tokens: int, num_lookahead_tokens: int, max_model_len: int
) -> SlotRanges:
    """A gate for a sequence of which nothing is computed."""
    end = min(num_tokens, max_model_len)
    slots_end = min(end + num_lookahead_tokens, max_model_len)
    return SlotRanges(0, 0, end, slots_end, num_encoder_tokens, end, is_gate=True)


def remaining_ranges(request: Request, num_drafts: int, max_model_len: int) -> SlotRanges:
    """A gate for the rest of a request's tokens, with slots for drafts behind them."""
    start = request.num_computed_tokens
    end = min(request.num_tokens, max_model_len)
    return SlotRanges(
        start, start, end, end + num_drafts, request.num_encoder_tokens, _prefill_end(request), is_gate=True
    )


def start_ranges(
    request: Request, num_new: int, num_hit: int, num_external: int, num_lookahead: int, max_model_len: int
) -> SlotRanges:
    """The first step of a request that starts, or comes back, with a hit and external tokens."""
    local_end = request.num_computed_tokens + num_hit
    computed_end = local_end + num_external
    new_end = min(computed_end, max_model_len) + num_new
    slots_end = min(new_end + num_lookahead, max_model_len)
    return SlotRanges(
        local_end,
        computed_end,
        new_end,
        slots_end,
        request.num_encoder_tokens,
        _prefill_end(request),
        resume_end=min(computed_end, request.num_tokens - 1),
    )


def _prefill_end(request: Request) -> int:
    """Where the known tokens end that are computed before the next new one: a resumed request's output counts too."""
    return max(request.num_prompt_tokens, request.num_tokens - 1)
