"""Writes the model classes of one vLLM release into the list that `kvledger plan` looks architectures up in.

KVLEDGER_VLLM_RELEASE=0.33 scripts/reference_python.sh pure scripts/vllm_classes.py 0.33
scripts/reference_python.sh pure scripts/vllm_classes.py 0.32

What the list says of other releases stays.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

TABLE = Path(__file__).parents[1] / "src" / "kvledger" / "plan" / "data" / "vllm_classes.tsv"


def classes() -> set[str]:
    """Architectures that the release has a class of its own for."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.model_executor.models.registry import ModelRegistry

    return set(ModelRegistry.get_supported_archs())


def merged(lines: Iterable[str], release: str, names: set[str]) -> dict[str, set[str]]:
    """Architecture -> the releases that have it."""
    known: dict[str, set[str]] = {}
    for line in lines:
        name, releases = line.split("\t")
        known[name] = set(releases.split()) - {release}
    for name in names:
        known.setdefault(name, set()).add(release)
    return {name: releases for name, releases in sorted(known.items()) if releases}


def main() -> None:
    (release,) = sys.argv[1:]
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    table = merged(lines, release, classes())
    TABLE.write_text("".join(f"{name}\t{' '.join(sorted(releases))}\n" for name, releases in table.items()))
    print(f"wrote {len(table)} architectures to {TABLE}")


if __name__ == "__main__":
    main()
