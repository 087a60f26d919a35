"""What differs between vLLM releases. A release is a row; where a row is not enough, one small function reads it."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kvledger.errors import wrong_value


@dataclass(frozen=True)
class VersionRules:
    """One release.

    `gdn_checkpoint_step`: tokens that the FlashInfer prefill kernel of gated delta nets aligns its checkpoints to when
    prefixes are cached; 0 where the release has no such checkpoints.
    """

    name: str
    gdn_checkpoint_step: int


VERSIONS = {
    "0.33": VersionRules("0.33", 64),
    "0.32": VersionRules("0.32", 0),
}
NEWEST_VERSION = "0.33"
# From this release on, the start-up log prints concurrency * max_model_len as the cache's tokens; before, whole blocks
# of one group.
TOKENS_BY_CONCURRENCY_SINCE = (0, 20)
# From this release on, the estimate of CUDA graphs is taken off the cache.
GRAPHS_TAKEN_OFF_SINCE = (0, 21)


def version_rules(name: str) -> VersionRules:
    """The rules of a release, given as 0.33 or 0.33.1. ConfigError lists those that are modelled."""
    rules = VERSIONS.get(".".join(name.removeprefix("v").split(".")[:2]))
    if rules is None:
        raise wrong_value("--vllm-version", name, "not a release that is modelled", "use " + " or ".join(VERSIONS))
    return rules


@cache
def known_classes() -> dict[str, tuple[str, ...]]:
    """Architecture -> the releases that have a class for it (data/vllm_classes.tsv)."""
    lines = (files("kvledger.plan") / "data/vllm_classes.tsv").read_text().splitlines()
    return {name: tuple(releases.split()) for name, releases in (line.split("\t") for line in lines)}


def unknown_class_note(rules: VersionRules, architecture: str) -> str:
    """What to know of an architecture that the release has no class for; "" where it has one."""
    if not architecture or rules.name in known_classes().get(architecture, ()):
        return ""
    return (
        f"vLLM {rules.name} has no class {architecture}: it would try transformers' own or refuse; planned by the "
        "fields of the config"
    )


def gdn_checkpoint_step(rules: VersionRules, compute_capability: float, key_head_dim: int) -> int:
    """Tokens between checkpoints of a gated delta net on that card, 0 without checkpoints.

    The kernel runs on compute capability 9.0, and on 10.x and 12.x (with CUDA 13) for key heads of 128.
    """
    runs = compute_capability == 9.0 or (compute_capability >= 10 and key_head_dim == 128)
    return rules.gdn_checkpoint_step if runs else 0


def release_of(version: str | None) -> tuple[int, int] | None:
    """(0, 33) of v0.33.1; None when it is not stated or not a release."""
    parts = (version or "").removeprefix("v").split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def tokens_by_concurrency(version: str | None) -> bool | None:
    """Which of the two token figures a release prints; None when the version is not stated or not a release."""
    release = release_of(version)
    return None if release is None else release >= TOKENS_BY_CONCURRENCY_SINCE


def graphs_are_taken_off(version: str | None) -> bool:
    """Whether that release takes CUDA graphs off the cache; one that is not stated is taken for a new one."""
    release = release_of(version)
    return release is None or release >= GRAPHS_TAKEN_OFF_SINCE
