"""A start that was measured -> the memory of another start on that machine.

What a log shows of a start is taken as it is, and what it leaves over is shared out among the terms that it does not
show. For other options the same terms are estimated for both starts, and each measured term changes as its estimate
does: a peak of twice the estimate stays at twice the estimate. So the plan of the log's own options is the log's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvledger.plan.terms import ESTIMATED, MEASURED, OTHER, WEIGHTS, Term, exact

IN_THE_LOG = "as in the log"
# Of what a term changes by, the share that may be wrong: weights are counted, the rest is estimated.
UNSURE_OF_WEIGHTS, UNSURE = 0.02, 0.5


@dataclass(frozen=True)
class Calibration:
    """One start. `estimated`: its terms as they are counted and estimated; `shown`: their bytes as measured.

    `requested_bytes`: the share of the card that was asked for, None where the card is not known. `low` to `high`: the
    cache's bytes, over the rounding of the log.
    """

    estimated: tuple[Term, ...]
    shown: Mapping[str, int]
    requested_bytes: int | None
    low: int
    high: int

    @property
    def available_bytes(self) -> int:
        return (self.low + self.high) // 2


def calibrate(
    estimated: Sequence[Term], shown: Mapping[str, int], requested_bytes: int | None, low: int, high: int
) -> Calibration:
    """The terms of a start, those that are not `shown` by their estimates and what is left over."""
    sizes = {term.name: shown.get(term.name, term.bytes) for term in estimated}
    if requested_bytes is not None:
        rest = requested_bytes - (low + high) // 2 - sum(sizes.values())
        unknown = [term for term in estimated if term.name not in shown and not term.is_exact]
        doubt = sum(term.high - term.low for term in unknown)
        for term in unknown:
            part = rest * (term.high - term.low) // doubt
            sizes[term.name] = max(0, sizes[term.name] + part)
        # What rounding left, and everything where all terms are shown.
        sizes[OTHER] += requested_bytes - (low + high) // 2 - sum(sizes.values())
    return Calibration(tuple(estimated), sizes, requested_bytes, low, high)


def changed_terms(start: Calibration, estimated: Sequence[Term]) -> tuple[Term, ...]:
    """The terms of another start on the same machine, by what it is estimated to have."""
    before = {term.name: term for term in start.estimated}
    return tuple(changed_term(start.shown[term.name], before[term.name], term) for term in estimated)


def changed_term(shown: int, before: Term, after: Term) -> Term:
    if before.bytes == after.bytes:
        return exact(after.name, shown, MEASURED, IN_THE_LOG)
    if after.name == OTHER or not before.bytes:
        size = max(0, shown + after.bytes - before.bytes)
    else:
        size = int(shown * after.bytes / before.bytes)
    doubt = int(abs(size - shown) * (UNSURE_OF_WEIGHTS if after.name == WEIGHTS else UNSURE))
    return Term(after.name, size, size - doubt, size + doubt, ESTIMATED, f"from the log's, for {after.detail}")


def changed_cache(start: Calibration, terms: Sequence[Term], requested_bytes: int | None) -> Term:
    """What is left for the cache: the log's, with what the share and the terms changed by."""
    more = 0
    if requested_bytes is not None and start.requested_bytes is not None:
        more = requested_bytes - start.requested_bytes
    if not more and all(term.bytes == start.shown[term.name] and term.is_exact for term in terms):
        return exact("KV cache", start.available_bytes, MEASURED, "available KV cache memory of the log")
    low = start.low + more - sum(term.high - start.shown[term.name] for term in terms)
    high = start.high + more - sum(term.low - start.shown[term.name] for term in terms)
    size = start.available_bytes + more - sum(term.bytes - start.shown[term.name] for term in terms)
    return Term("KV cache", size, low, high, ESTIMATED, "the log's, changed by the other terms")
