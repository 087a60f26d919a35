"""The half-open token ranges of one allocate_slots call, computed once and read by every layer below.

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

from mypy_extensions import mypyc_attr


@mypyc_attr(acyclic=True)
class SlotRanges:
    """Positions in tokens from the start of the sequence; new_end and slots_end respect max_model_len as vLLM does."""

    def __init__(self, local_end: int, external: int, new: int, lookahead: int, max_model_len: int) -> None:
        self.local_end: Final = local_end
        self.num_external: Final = external
        self.num_new: Final = new
        # Not capped: it may run past max_model_len when the cache knows more than the model takes.
        self.computed_end: Final = local_end + external
        self.new_end: Final = min(self.computed_end, max_model_len) + new
        self.slots_end: Final = min(self.new_end + lookahead, max_model_len)
