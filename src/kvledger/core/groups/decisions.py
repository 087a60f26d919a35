"""Where vLLM's releases decide differently: one named rule for each difference, and a release as a set of answers.

Chosen once, when a ledger is made; nothing asks for a version later. docs/differences.md says of each rule what it
changes. A release that nobody has looked at yet is compared with these by its own files (docs/releases.md).
"""

from dataclasses import dataclass, replace
from typing import Final

from kvledger.errors import wrong_value


@dataclass(frozen=True)
class Decisions:
    """The rules of one release.

    `hashes_ahead`: a block's hash also covers the tokens that a draft's values in it depend on, so that no block of a
    hit is dropped; otherwise the last one is.
    `keeps_block_below_junction`: with sparse retention and dropped blocks, the tail one block below a shared prefix is
    kept too.
    `recaches_hit_states`: a state that was hit counts as written again when its request reaches its end, and nobody can
    start from it in that step.
    `caches_verified_drafts`: what verified drafts or overlapping steps filled is indexed when its step returns, up to
    what has returned; otherwise drafts when the next step is scheduled, and overlapping steps up to what is expected.
    `trims_stops`: tokens behind a stop inside a verified draft count as returned, and as not computed.
    `victim_yields`: a request that has to preempt itself under PRIORITY lets those behind it have their turn in the
    same step.
    `skips_reserved_chunks`: a waiting request whose chunk would end too near to its prompt's end is passed over;
    otherwise everybody waits behind it.
    `nulls_below_windows`: a step's copy of a block table has null blocks below a sliding window, where others may own
    the blocks by now; otherwise old ids.
    `delays_renamed_states`: a state of an earlier step that this step names again, or moves to another block, is no hit
    before the next one; and with several draft modules a state inside its block is named for what it has gone beyond.
    All releases; ours does neither, unless exact() is asked for.
    """

    release: str
    hashes_ahead: bool
    keeps_block_below_junction: bool
    recaches_hit_states: bool
    caches_verified_drafts: bool
    trims_stops: bool
    victim_yields: bool
    skips_reserved_chunks: bool
    nulls_below_windows: bool
    delays_renamed_states: bool = False

    def exact(self) -> "Decisions":
        """The same release without what a ledger does better by a rule: inside vLLM, and for comparisons with it."""
        return replace(self, delays_renamed_states=True)


_RELEASES: Final = {
    "0.32": Decisions(
        release="0.32",
        hashes_ahead=False,
        keeps_block_below_junction=False,
        recaches_hit_states=True,
        caches_verified_drafts=False,
        trims_stops=False,
        victim_yields=False,
        skips_reserved_chunks=False,
        nulls_below_windows=False,
    ),
    "0.33": Decisions(
        release="0.33",
        hashes_ahead=True,
        keeps_block_below_junction=True,
        recaches_hit_states=False,
        caches_verified_drafts=True,
        trims_stops=True,
        victim_yields=True,
        skips_reserved_chunks=True,
        nulls_below_windows=True,
    ),
}
RELEASES: Final = tuple(sorted(_RELEASES))
LATEST_RELEASE: Final = RELEASES[-1]


def decisions_of(release: str | Decisions) -> Decisions:
    """The rules of that release, or rules as given. ConfigError for a release whose decisions are not known."""
    if isinstance(release, Decisions):
        return release
    found = _RELEASES.get(release)
    if found is None:
        problem = "no release of vLLM whose decisions are known"
        raise wrong_value("decisions", release, problem, "use " + " or ".join(RELEASES))
    return found
