"""One part of a card's memory: its bytes, where they came from, and the range that holds the truth."""

from dataclasses import dataclass

GIVEN, MEASURED, COUNTED, ESTIMATED = "given", "measured", "counted", "estimated"
WEIGHTS, ACTIVATIONS, GRAPHS, OTHER = "weights", "activation peak", "CUDA graphs", "other"


@dataclass(frozen=True)
class Term:
    """`origin`: given, measured, counted or estimated; `low` to `high` is its range."""

    name: str
    bytes: int
    low: int
    high: int
    origin: str
    detail: str

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


def exact(name: str, size: int, origin: str, detail: str) -> Term:
    return Term(name, size, size, size, origin, detail)
