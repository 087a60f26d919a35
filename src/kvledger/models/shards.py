"""One weight of a model and how tensor parallelism divides it."""

from dataclasses import dataclass

FIRST_STAGE = -1
LAST_STAGE = -2
# Into how many parts a weight can be divided: none, or as many as there are ranks.
WHOLE = 1
ANY = 1 << 30


@dataclass(frozen=True)
class Weight:
    """`layer`: its decoder layer, FIRST_STAGE or LAST_STAGE. `parts`: the most ranks that hold different parts of it.

    With more ranks than parts, ranks hold copies. `linear`: a matrix that quantization may apply to. `expert`: routed
    experts, which may be shared out over more ranks than the rest.
    """

    path: str
    params: int
    layer: int
    parts: int = ANY
    linear: bool = False
    expert: bool = False

    def on_rank(self, ranks: "Ranks") -> int:
        """Parameters on one rank."""
        sharing = ranks.experts if self.expert else ranks.tensor
        return -(-self.params // min(self.parts, sharing))


@dataclass(frozen=True)
class Ranks:
    """How many ranks share a layer, and how many share the routed experts."""

    tensor: int = 1
    experts: int = 1


def linear(layer: int, name: str, params: int, parts: int = ANY) -> Weight:
    """A linear layer of a decoder layer."""
    return Weight(f"layers.{layer}.{name}", params, layer, parts, True)


def heads(layer: int, name: str, params: int, num_heads: int) -> Weight:
    """A projection whose heads are not divided: a rank holds at least one of them."""
    return linear(layer, name, params, num_heads)
