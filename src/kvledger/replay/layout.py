"""KVLayout: the groups of an engine's KV cache and the rules of its ledger, wherever they come from.

planned_engine.py     what `kvledger plan` makes of a model
layout_file.py        a small file, written by hand
"""

from dataclasses import dataclass, replace

from kvledger.core.groups.policy import DraftRule
from kvledger.core.groups.registry import ManagerRegistry
from kvledger.core.groups.spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from kvledger.core.ledger.ledger_rules import LedgerRules
from kvledger.errors import KVLedgerError, wrong_value


class InputError(KVLedgerError):
    """A model, plan or layout file that nothing can be replayed on: says why, and what to give instead."""


# Longer than any request: the pool alone limits them.
NO_LIMIT = (1 << 31) - 1
# A pool of that many takes several GB of this machine's memory.
MAX_BLOCKS = 1 << 26
# Groups of one layout, and layers of all of them: no model has a tenth of that.
MAX_GROUPS = 1 << 8
MAX_LAYERS = 10_000
# What one block may take. Products of it stay within 64 bits.
MAX_BLOCK_BYTES = 1 << 50


@dataclass(frozen=True)
class KVLayout:
    """`bytes_per_block`: of the pool, whose blocks any group can take. `group_bytes`: what each group has in one, all
    of it unless layers are missing to a full group.

    `max_in_flight_tokens`: what the engine was planned with, 0: the tokens of one step. `drafts`: tokens that a draft
    model looks ahead, 0: no draft. `retention_interval`: KVCacheManager's.
    """

    groups: tuple[KVCacheGroupSpec, ...]
    bytes_per_block: int
    group_bytes: tuple[int, ...]
    max_in_flight_tokens: int = 0
    context_parallel_size: int = 1
    drafts: int = 0
    retention_interval: int | None = None

    def __post_init__(self) -> None:
        if self.retention_interval is not None and not any(is_sparse(group.spec) for group in self.groups):
            problem = "no group keeps windows or states, so there is nothing to thin out"
            raise wrong_value("retention_interval", self.retention_interval, problem, "leave it out")

    @property
    def draft_rule(self) -> DraftRule | None:
        return DraftRule() if self.drafts else None

    def with_drafts(self, drafts: int) -> "KVLayout":
        """The same with a draft model. Its layers are among those of full attention, where there are any; recurrent
        layers keep a state for each of its tokens.
        """
        has_full = not all(is_sparse(group.spec) for group in self.groups)
        groups = tuple(
            replace(
                group,
                spec=_with_draft_states(group.spec, drafts),
                is_draft=has_full and not is_sparse(group.spec),
            )
            for group in self.groups
        )
        return replace(self, groups=groups, drafts=drafts)

    def config(self, num_blocks: int) -> KVCacheConfig:
        return KVCacheConfig(num_blocks, self.groups)

    def rules(self, enable_caching: bool, max_model_len: int, max_in_flight_tokens: int) -> LedgerRules:
        """What KVCacheManager makes of this layout, to ask for hash units and where hits end."""
        return LedgerRules(
            registry=ManagerRegistry(),
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            enable_caching=enable_caching,
            drafts=self.draft_rule,
            retention_interval=self.retention_interval,
            context_parallel_size=self.context_parallel_size,
        )


def is_sparse(spec: KVCacheSpec) -> bool:
    """Whether a long request holds fewer blocks than its table has entries: windows, chunks, states."""
    return spec.max_admission_blocks(NO_LIMIT, 1) < spec.max_blocks_per_request(NO_LIMIT)


def num_blocks_in(memory_bytes: int, bytes_per_block: int, field: str = "memory") -> int:
    """Blocks of a pool of that many bytes. ConfigError about `field` when not even one usable block fits."""
    num_blocks = memory_bytes // bytes_per_block
    if num_blocks < 2:
        raise wrong_value(
            field,
            memory_bytes,
            f"holds {max(0, num_blocks)} blocks of {bytes_per_block} bytes, and 2 are the least",
            "give more memory or fewer bytes per token",
        )
    if num_blocks > MAX_BLOCKS:
        problem = f"holds {num_blocks:,} blocks of {bytes_per_block} bytes, and {MAX_BLOCKS:,} are the most"
        raise wrong_value(field, memory_bytes, problem, "give less memory, or larger blocks")
    return num_blocks


def _with_draft_states(spec: KVCacheSpec, drafts: int) -> KVCacheSpec:
    return replace(spec, num_speculative_blocks=drafts) if isinstance(spec, MambaSpec) else spec
