"""One weight of a model and how tensor parallelism divides it."""

from dataclasses import dataclass

from kvledger.core.units import cdiv, round_up

FIRST_STAGE = -1
LAST_STAGE = -2
# Into how many parts a weight can be divided: none, or as many as there are ranks.
WHOLE = 1
ANY = 1 << 30
# MXFP4 experts are padded to multiples of these (the slice of the feed-forward width, and the hidden size).
INNER_STEP, OUTER_STEP = 128, 256


@dataclass(frozen=True)
class Weight:
    """`layer`: its decoder layer, FIRST_STAGE or LAST_STAGE. `parts`: the most ranks that hold different parts of it.

    With more ranks than parts, ranks hold copies. `linear`: a matrix that quantization may apply to. `expert`: routed
    experts, which may be shared out over more ranks than the rest. `inner`, `outer`: the two sizes of an expert's
    matrices, 0 for other weights.
    """

    path: str
    params: int
    layer: int
    parts: int = ANY
    linear: bool = False
    expert: bool = False
    inner: int = 0
    outer: int = 0

    def on_rank(self, ranks: "Ranks") -> int:
        """Parameters on one rank."""
        sharing = ranks.experts if self.expert else ranks.tensor
        return cdiv(self.params, min(self.parts, sharing))

    def padded_on_rank(self, ranks: "Ranks") -> int:
        """Parameters on one rank where an expert's kernels take sizes in steps only (MXFP4)."""
        if not (self.expert and self.inner and self.outer):
            return self.on_rank(ranks)
        # With parallel experts a rank has whole ones, else a slice of each.
        slices = 1 if ranks.whole_experts else ranks.experts
        inner = cdiv(self.inner, slices)
        matrices = self.params // (self.inner * self.outer)
        return cdiv(matrices * slices, ranks.experts) * round_up(inner, INNER_STEP) * round_up(self.outer, OUTER_STEP)


@dataclass(frozen=True)
class Ranks:
    """How many ranks share a layer, and how many share the routed experts: whole ones, or a slice of each."""

    tensor: int = 1
    experts: int = 1
    whole_experts: bool = False


def linear(layer: int, name: str, params: int, parts: int = ANY) -> Weight:
    """A linear layer of a decoder layer."""
    return Weight(f"layers.{layer}.{name}", params, layer, parts, True)


def heads(layer: int, name: str, params: int, num_heads: int) -> Weight:
    """A projection whose heads are not divided: a rank holds at least one of them."""
    return linear(layer, name, params, num_heads)
