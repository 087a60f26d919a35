"""Why prompts missed, as a part of the replay's result and in words.

The numbers are MissExplainer's; this module adds shares, what a larger pool would have kept, and the sentence that
explains a hit rate.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from kvledger.core.extents.extent_misses import ExtentMisses
from kvledger.core.watch.miss_explainer import MissExplainer
from kvledger.core.watch.prompt_split import MissTotals, curve_blocks

# Part of a prompt -> what it is called, in the order of the prompt.
PART_WORDS: Final = {
    "hit": "hit",
    "external": "hit outside the pool",
    "limited_by_group": "cached by other groups only",
    "draft_rule": "computed again for the draft",
    "evicted": "evicted",
    "evicted_by_call": "taken back by evict_blocks",
    "reset": "reset",
    "promoted": "renamed for a longer prefix",
    "other_salt": "cached under another salt",
    "other_adapter": "cached under another adapter",
    "other_epoch": "cached in an earlier epoch",
    "other_content": "cached with other images or audio",
    "never_seen": "never seen before",
    "shorter_than_block": "shorter than a block",
    "last_token_rule": "last-token rule",
    "lookup_off": "not looked up",
}


class MoreBlocks(msgspec.Struct):
    """So many blocks more would have kept num_tokens of the evicted tokens, for that hit rate."""

    num_blocks: int
    num_tokens: int
    token_hit_rate: float


class WhyMissed(msgspec.Struct):
    """`tokens`: the prompts of first admissions by part, which sum to num_tokens; `resumed_tokens`: the same of
    requests that were preempted before. `limited_by_group`: tokens for each group.

    `num_forgotten_evictions` above 0: only later evictions are known, so that never_seen also holds what was evicted
    more than num_remembered_evictions evictions ago.
    """

    num_requests: int
    num_tokens: int
    tokens: dict[str, int]
    resumed_tokens: dict[str, int]
    limited_by_group: list[int]
    num_remembered_evictions: int
    num_forgotten_evictions: int
    more_blocks: list[MoreBlocks]
    summary: str


def why_missed(misses: MissExplainer | ExtentMisses, num_remembered: int, hit_step: int) -> WhyMissed:
    """The result. `num_remembered`: evictions that the explainer may remember; `hit_step`: where hits can end."""
    totals = misses.new
    why = WhyMissed(
        totals.num_requests,
        totals.num_tokens,
        totals.split.as_dict(),
        misses.resumed.split.as_dict(),
        list(totals.limited),
        num_remembered,
        misses.num_forgotten,
        _more_blocks(totals),
        "",
    )
    why.summary = summary(why, hit_step)
    return why


def _more_blocks(totals: MissTotals) -> list[MoreBlocks]:
    """Points of the curve where it rises, each with all that smaller ones keep."""
    points: list[MoreBlocks] = []
    kept = 0
    for point, num_tokens in enumerate(totals.tokens_kept_by):
        if num_tokens:
            kept += num_tokens
            points.append(MoreBlocks(curve_blocks(point), kept, (totals.split.hit + kept) / totals.num_tokens))
    return points


# The sentence


def summary(why: WhyMissed, hit_step: int) -> str:
    """What a person should know first: the hit rate, the main cause of the misses, and what would help."""
    if why.num_tokens == 0:
        return "No request was admitted."
    tokens = why.tokens
    missed = why.num_tokens - tokens["hit"] - tokens["external"]
    if missed == 0:
        return "Every prompt token was hit."
    part = max((name for name in PART_WORDS if name not in ("hit", "external")), key=lambda name: tokens[name])
    share = tokens[part] / missed
    rate = tokens["hit"] / why.num_tokens
    start = "No prompt token was hit" if tokens["hit"] == 0 else f"{rate:.1%} of the prompt tokens were hit"
    what = "everything else" if tokens["hit"] else "everything"
    amount = what if tokens[part] == missed else f"{share:.1%} of {'the rest' if tokens['hit'] else 'all'}"
    return f"{start}: {amount} {_CAUSES[part](why, hit_step)}."


def _evicted(why: WhyMissed, hit_step: int) -> str:
    for point in why.more_blocks:
        if point.num_tokens >= why.tokens["evicted"] / 2:
            break
    share = point.num_tokens / why.tokens["evicted"]
    return f"was cached and evicted before it came again; {point.num_blocks:,} more blocks would have kept {share:.0%}"


def _never_seen(why: WhyMissed, hit_step: int) -> str:
    if why.num_forgotten_evictions:
        return f"was never seen before, or evicted more than {why.num_remembered_evictions:,} evictions ago"
    return "was never seen before"


def _limited(why: WhyMissed, hit_step: int) -> str:
    group = max(range(len(why.limited_by_group)), key=why.limited_by_group.__getitem__)
    return f"was cached by other groups and not by group {group}"


def _short(why: WhyMissed, hit_step: int) -> str:
    return f"lies behind the last place where a hit can end: hits end at multiples of {hit_step:,} tokens"


def _words(words: str) -> Callable[[WhyMissed, int], str]:
    return lambda why, hit_step: words


_CAUSES: Final[dict[str, Callable[[WhyMissed, int], str]]] = {
    "evicted": _evicted,
    "never_seen": _never_seen,
    "limited_by_group": _limited,
    "shorter_than_block": _short,
    "draft_rule": _words("was cached, and is computed again because the draft model needs it"),
    "evicted_by_call": _words("was cached and taken back by evict_blocks"),
    "reset": _words("was cached before the prefix cache was reset"),
    "promoted": _words("was cached in a block that answers for a longer prefix now"),
    "other_salt": _words("is cached under another cache salt"),
    "other_adapter": _words("is cached under another adapter"),
    "other_epoch": _words("is cached from before the weights changed"),
    "other_content": _words("is cached with other images or audio in the same places"),
    "last_token_rule": _words("is the last block of a prompt that ends with it, and one token must be computed"),
    "lookup_off": _words("was not looked up: prefix caching is off, or the requests asked for that"),
}
