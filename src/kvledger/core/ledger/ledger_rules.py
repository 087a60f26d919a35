"""LedgerRules: everything that the layers below KVCacheManager are told once."""

from dataclasses import dataclass
from math import gcd, lcm

from kvledger.core.blocks.observer import LedgerObserver
from kvledger.core.groups.decisions import LATEST_RELEASE, Decisions, decisions_of
from kvledger.core.groups.policy import DraftRule, GroupPolicy
from kvledger.core.groups.registry import ManagerRegistry
from kvledger.core.groups.spec import KVCacheConfig, KVCacheSpec
from kvledger.core.units import MAX_COUNT, require_positive
from kvledger.errors import wrong_value


@dataclass(frozen=True)
class LedgerRules:
    """Meanings are KVCacheManager's. `hash_block_size` 0: the greatest common divisor of the block sizes."""

    registry: ManagerRegistry
    max_model_len: int
    max_in_flight_tokens: int
    enable_caching: bool = True
    hash_block_size: int = 0
    drafts: DraftRule | None = None
    retention_interval: int | None = None
    context_parallel_size: int = 1
    pins_shared_prefix: bool = False
    decisions: str | Decisions = LATEST_RELEASE
    observer: LedgerObserver | None = None

    def __post_init__(self) -> None:
        require_positive("max_model_len", self.max_model_len, MAX_COUNT)
        require_positive("max_in_flight_tokens", self.max_in_flight_tokens, MAX_COUNT)
        require_positive("context_parallel_size", self.context_parallel_size, MAX_COUNT)
        decisions_of(self.decisions)

    @property
    def release(self) -> Decisions:
        """The rules of the release that decides."""
        return decisions_of(self.decisions)

    @property
    def num_hash_lookahead(self) -> int:
        """Tokens behind a block that its hash covers as well."""
        drafts = self.drafts
        if drafts is None or not drafts.values_depend_on_next or not self.enable_caching:
            return 0
        hashes_ahead = self.release.hashes_ahead if drafts.hashes_ahead is None else drafts.hashes_ahead
        return drafts.num_lookahead_tokens if hashes_ahead else 0

    @property
    def drops_last_blocks(self) -> bool:
        """Whether hits of draft groups give up their last block."""
        return self.drafts is not None and self.drafts.values_depend_on_next and self.num_hash_lookahead == 0

    def block_size(self, spec: KVCacheSpec) -> int:
        """Tokens in one block over all context-parallel ranks."""
        return spec.block_size * (self.context_parallel_size if spec.shards_over_context else 1)

    def resolved_hash_block_size(self, config: KVCacheConfig) -> int:
        """Tokens under one hash. ConfigError when it does not divide every block size that is cached."""
        sizes = [self.block_size(group.spec) for group in config.groups if group.spec.prefix_cacheable]
        if not self.enable_caching or not sizes:
            return self.hash_block_size or min([self.block_size(group.spec) for group in config.groups])
        size = self.hash_block_size or gcd(*sizes)
        for block_size in sizes:
            if block_size % size != 0 or (len(config.groups) == 1 and block_size != size):
                raise wrong_value(
                    "hash_block_size",
                    size,
                    f"does not fit a group with blocks of {block_size} tokens",
                    "give a common divisor of all block sizes; with one group, its block size",
                )
        return size

    def policies(self, config: KVCacheConfig) -> list[GroupPolicy]:
        """The policy of each group."""
        unit = self.resolved_hash_block_size(config)
        base = lcm(*[self.block_size(group.spec) for group in config.groups])
        hits_inside_blocks = self._finds_hits_inside_blocks(config, unit)
        alignment = unit if hits_inside_blocks else base
        self._require_sound(config, base)
        num_unsettled = 0 if self.drafts is None else max(0, self.drafts.num_lookahead_tokens - 1)
        has_marked = self.drafts is not None and any(group.is_draft for group in config.groups)
        # Without a draft a request resumes at the block below, which is cached anyway.
        pins_shared_prefix = (
            self.pins_shared_prefix
            and (self.drops_last_blocks or has_marked)
            and hits_inside_blocks
            and num_unsettled == 0
        )
        release = self.release
        policies: list[GroupPolicy] = []
        for group in config.groups:
            block_size = self.block_size(group.spec)
            is_draft = self._is_draft(config, group.spec)
            most = group.max_admission_blocks(self.max_model_len, self.max_in_flight_tokens)
            policies.append(
                GroupPolicy(
                    hash_block_size=unit if self.enable_caching and group.spec.prefix_cacheable else block_size,
                    hit_alignment=alignment if self.enable_caching else block_size,
                    base_block_size=base,
                    hits_inside_blocks=hits_inside_blocks,
                    is_draft=is_draft,
                    any_draft=self.drops_last_blocks,
                    # Of several groups, those that drop nothing end at whole blocks of all groups anyway, as in vLLM.
                    num_unsettled=num_unsettled if is_draft or len(config.groups) == 1 else 0,
                    num_draft_lookahead=0 if self.drafts is None else self.drafts.num_lookahead_tokens,
                    num_hash_lookahead=self.num_hash_lookahead,
                    keeps_block_below_junction=release.keeps_block_below_junction,
                    recaches_hit_states=release.recaches_hit_states,
                    delays_renamed_states=release.delays_renamed_states,
                    retention_interval=-1 if self.retention_interval is None else self.retention_interval,
                    max_admission_blocks=most,
                    max_step_blocks=most,
                    context_parallel_size=self.context_parallel_size,
                    pins_shared_prefix=pins_shared_prefix,
                )
            )
        return policies

    def _finds_hits_inside_blocks(self, config: KVCacheConfig, unit: int) -> bool:
        """Only where a state is cached inside its block and every other group can share blocks in part."""
        if not self.enable_caching or len(config.groups) == 1:
            return False
        wanted = False
        for group in config.groups:
            spec = group.spec
            if spec.checkpoints_inside_blocks and (
                spec.block_size > unit or (self.context_parallel_size > 1 and spec.block_size >= unit)
            ):
                wanted = True
            if spec.prefix_cacheable and not spec.hits_inside_blocks and self.block_size(spec) != unit:
                return False
        return wanted

    def _is_draft(self, config: KVCacheConfig, spec: KVCacheSpec) -> bool:
        """Whether hits of such a group give up their last block: groups marked as the draft's, those of an equal spec
        (looked up with them), or all if none is marked."""
        if not self.drops_last_blocks:
            return False
        marked = [group for group in config.groups if group.is_draft]
        return not marked or any(group.spec == spec for group in marked)

    def _require_sound(self, config: KVCacheConfig, base: int) -> None:
        interval = self.retention_interval
        if interval is not None and (interval < 0 or interval % base != 0):
            raise wrong_value(
                "retention_interval", interval, f"no multiple of {base}, where hits can end", "give 0 or a multiple"
            )
        drafts = self.drafts
        is_flagged = self.drops_last_blocks or any(group.is_draft for group in config.groups)
        if self.enable_caching and drafts is not None and is_flagged and base < drafts.num_lookahead_tokens:
            raise wrong_value(
                "num_lookahead_tokens",
                drafts.num_lookahead_tokens,
                f"more than the {base} tokens that a hit gives up for the draft",
                "use larger blocks or fewer draft tokens",
            )
