"""Which modules of a model a checkpoint means: the same part under the names of different families and formats."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import translate

# What follows `experts.` is the number of an expert, or a star for all, and the matrix: one format for all of them.
# NemotronH calls every block a mixer, whatever it holds.
SAME_PARTS = (
    (re.compile(r"\b(block_sparse_moe|feed_forward|ffn)\b"), "mlp"),
    (re.compile(r"\bmixer\.(experts|shared_experts?|gate|latent\w*)\b"), r"mlp.\1"),
    (re.compile(r"\bmixer\.([qkvo]_proj)\b"), r"self_attn.\1"),
    (re.compile(r"\bshared_expert\b"), "shared_experts"),
    (re.compile(r"\b(gate_proj|up_proj)\b"), "gate_up_proj"),
    (re.compile(r"\bin_proj_[ab]\b"), "in_proj_ba"),
    (re.compile(r"\bexperts\.(\*|\d+)(?![^.]).*"), "experts"),
)


def module_key(path: str) -> str:
    """A module's path from its layer on, under one name for each part, so that ours and the checkpoint's compare."""
    key = path.rpartition("layers.")[2] if "layers." in path else path.removeprefix("model.")
    for pattern, name in SAME_PARTS:
        key = pattern.sub(name, key)
    return key


def enclosing(key: str) -> Iterator[str]:
    """The module and everything that it lies in."""
    yield key
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


class ModuleSet:
    """Modules that a checkpoint lists by path, by glob or by regular expression; a listed module covers its parts."""

    def __init__(self, listed: Sequence[str]) -> None:
        self.names: set[str] = set()
        self.single: set[str] = set()
        expressions = []
        for pattern in listed:
            if pattern.startswith("mtp"):
                # Draft layers count from 0 again; they are no part of the model here.
                continue
            if pattern.startswith("re:"):
                expressions.append(f"(?:.*\\.)?(?:{pattern[3:]})")
                continue
            plain = module_key(pattern).rstrip("*").rstrip(".")
            if "*" in plain:
                expressions.append(translate(plain + "*"))
            elif "." in pattern:
                self.names.add(plain)
            else:
                self.single.add(plain)
        self.expression = re.compile("|".join(expressions)) if expressions else None

    def covers(self, key: str) -> bool:
        """Whether the module of that key is listed."""
        if any(name in self.names for name in enclosing(key)) or not self.single.isdisjoint(key.split(".")):
            return True
        return self.expression is not None and self.expression.match(f"layers.{key}") is not None
