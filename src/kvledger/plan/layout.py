"""Groups that waste less than vLLM's rule: every group size is tried, and the one that reserves least is taken.

A block is one page for each layer of a group, so padding layers cost memory in every block of their group. How much
that is depends on how many blocks the group holds: padding in a windowed or recurrent group costs little, in a full
one a lot.
"""

from dataclasses import dataclass, replace

from kvledger.core.groups.spec import KVCacheSpec
from kvledger.plan.groups import GroupLayout, Specs, buckets_of, equal_groups, equal_pages, vllm_group_size
from kvledger.plan.plan import Plan
from kvledger.plan.pool import RequestLimits, blocks_per_request

# More groups mean more block tables to keep; a gain under this share is not worth them.
WORTH_MORE_GROUPS = 0.01


@dataclass(frozen=True)
class LayoutChoice:
    """One group size. `request_bytes`: what a request of full length reserves; `ideal_bytes`: what its layers need."""

    group_size: int
    num_groups: int
    padding_layers: int
    request_bytes: int
    ideal_bytes: int

    @property
    def waste(self) -> float:
        """Share of the reserved bytes that no layer needs."""
        return 1 - self.ideal_bytes / self.request_bytes if self.request_bytes else 0.0


@dataclass(frozen=True)
class LayoutComparison:
    """vLLM's group size and the best one. `extra_requests`: share of requests more that fit with the best."""

    buckets: tuple[int, ...]
    vllm: LayoutChoice
    best: LayoutChoice

    @property
    def extra_requests(self) -> float:
        return self.vllm.request_bytes / self.best.request_bytes - 1 if self.best.request_bytes else 0.0


def layout_choice(specs: Specs, group_size: int, limits: RequestLimits) -> LayoutChoice:
    """What a request reserves with groups of that size."""
    layout = GroupLayout(equal_groups(specs, group_size))
    # A block has room for group_size layers even where every group is smaller.
    page = next(iter(specs.values())).page_size_bytes
    ideal = sum(page * spec_blocks(spec, limits) for spec in specs.values())
    slots = group_size * len(layout.groups)
    return LayoutChoice(
        group_size,
        len(layout.groups),
        slots - len(specs),
        blocks_per_request(layout.groups, limits) * page * group_size,
        ideal,
    )


def spec_blocks(spec: KVCacheSpec, limits: RequestLimits) -> int:
    return spec.max_admission_blocks(limits.max_model_len, limits.max_in_flight_tokens)


def compare_layouts(specs: Specs, limits: RequestLimits) -> LayoutComparison | None:
    """vLLM's group size against every other; None when the layers need only one group."""
    specs = equal_pages(specs)
    sizes = [len(bucket) for bucket in buckets_of(specs)]
    if len(sizes) < 2:
        return None
    choices = [layout_choice(specs, size, limits) for size in range(1, max(sizes) + 1)]
    least = min(choice.request_bytes for choice in choices)
    good = [choice for choice in choices if choice.request_bytes <= least * (1 + WORTH_MORE_GROUPS)]
    best = min(good, key=lambda choice: (choice.num_groups, choice.request_bytes))
    chosen = choices[vllm_group_size(sizes) - 1]
    return LayoutComparison(tuple(sizes), chosen, best if best.request_bytes < chosen.request_bytes else chosen)


def compare_plan_layouts(plan: Plan) -> LayoutComparison | None:
    """The comparison for a plan; None for one group, packed pages, or the hybrid manager off."""
    if plan.layout.packed or not plan.request.has_hybrid_manager or len(plan.layout.groups) < 2:
        return None
    cache = plan.settings.cache
    specs = {layer.name: layer.spec(cache) for layer in plan.request.layers}
    return compare_layouts(specs, replace(plan.limits, decode_context_parallel_size=1))
