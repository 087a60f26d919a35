"""Which drafts of a step turn out right."""

from collections.abc import Sequence


def verify_drafts(tokens: Sequence[int], draft_token_ids: Sequence[int]) -> list[int]:
    """The accepted drafts and the token that follows them.

    tokens[i] is the token that goes where draft i was put, if all drafts before it are right; the last one follows all
    of them, so there is one more than drafts. A draft of -1 (unknown) is never right.
    """
    num_accepted = 0
    for draft, token in zip(draft_token_ids, tokens, strict=False):
        if draft != token:
            break
        num_accepted += 1
    return list(tokens[: num_accepted + 1])
