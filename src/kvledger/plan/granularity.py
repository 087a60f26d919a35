"""In what steps prefixes are reused, and which settings make that useless."""

import math
from dataclasses import dataclass

from kvledger.core.groups.spec import MambaSpec
from kvledger.plan.plan import Plan

# A prompt below this many tokens is common; a larger step means that such prompts never hit.
COMMON_PROMPT = 512


@dataclass(frozen=True)
class ReuseStep:
    """Prefixes hit in multiples of `tokens`; `warning` says when that is too coarse to be of use."""

    tokens: int
    warning: str


def common_step(block_sizes: list[int]) -> int:
    """Tokens between the places where every group has a block boundary."""
    return math.lcm(*block_sizes) if block_sizes else 0


def reuse_step(plan: Plan) -> ReuseStep | None:
    """The step of prefix reuse; None where prefixes are not cached or nothing is kept."""
    if not plan.settings.prefix_caching or not plan.layout.groups:
        return None
    sizes = [
        group.spec.block_size
        for group in plan.layout.groups
        if not (isinstance(group.spec, MambaSpec) and group.spec.mamba_cache_mode == "none")
    ]
    step = common_step(sizes)
    if plan.facts.is_compressed:
        # The window and the open groups of a compressor are rebuilt, so only the stored latents decide.
        step = max(sizes, default=0)
    return ReuseStep(step, coarse_warning(plan, step, sizes))


def coarse_warning(plan: Plan, step: int, sizes: list[int]) -> str:
    if step > max(sizes, default=0):
        return (
            f"blocks of {' and '.join(map(str, sorted(set(sizes))))} tokens meet every {step:,} tokens only: "
            "shorter common prefixes never hit"
        )
    if step > COMMON_PROMPT:
        return f"prefixes are reused in steps of {step:,} tokens: shorter prompts never hit, and hold a whole block"
    return ""
