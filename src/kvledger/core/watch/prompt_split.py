"""Where a prompt's tokens come from: hits, and for what missed, why. The numbers of one prompt sum to its tokens.

    | hit | external | limited | draft | evicted | other identity | never seen | tail: short, or the last-token rule |

In this order along the prompt; every token stands in the first of the parts that it could be in. The tail is what no
prompt of that length can hit, whatever is cached.
"""

from dataclasses import dataclass
from typing import Final

from kvledger.core.record import Record
from kvledger.core.units import require_positive
from kvledger.errors import wrong_value

# Points of MissTotals.tokens_kept_by.
NUM_CURVE_POINTS: Final = 160


def curve_blocks(point: int) -> int:
    """How many more blocks a point of the curve stands for: 1 2 3 4, 5 6 7 8, 10 12 14 16, 20 24 28 32, ..."""
    return point + 1 if point < 4 else (5 + point % 4) << (point // 4 - 1)


@dataclass(frozen=True, eq=False, repr=False)
class MissConfig(Record):
    """Bounds of what is remembered to explain misses.

    `max_evicted_blocks`: evictions, 9 to 15 bytes each where prompts are long, 110 where every block stands alone.
    `max_compared_tokens`: tokens of prompts that are compared with those of other salts and adapters, about 10 bytes
    each. `max_accounts`: last requests that can be asked about.
    """

    max_evicted_blocks: int = 1 << 20
    max_compared_tokens: int = 1 << 22
    max_accounts: int = 1 << 10

    def __post_init__(self) -> None:
        for field, value in (
            ("max_evicted_blocks", self.max_evicted_blocks),
            ("max_compared_tokens", self.max_compared_tokens),
            ("max_accounts", self.max_accounts),
        ):
            if not isinstance(value, int):
                raise wrong_value(field, value, "no whole number", "give an int")
            require_positive(field, value)


class PromptSplit(Record):
    """Tokens by where they come from."""

    def __init__(self) -> None:
        self.hit: int = 0
        # From outside the pool.
        self.external: int = 0
        # Other groups have them cached and one has not.
        self.limited_by_group: int = 0
        # Cached, and computed again for the draft.
        self.draft_rule: int = 0
        # Cached once; a new block needed the place.
        self.evicted: int = 0
        # Cached once; taken back by evict_blocks, by reset_prefix_cache, or because the block names a longer prefix.
        self.evicted_by_call: int = 0
        self.reset: int = 0
        self.promoted: int = 0
        # The same tokens are cached under another identity.
        self.other_salt: int = 0
        self.other_adapter: int = 0
        self.other_epoch: int = 0
        self.other_content: int = 0
        self.never_seen: int = 0
        # Behind the last place where a hit can end.
        self.shorter_than_block: int = 0
        # The last whole block of a prompt that ends with it: one token must be computed.
        self.last_token_rule: int = 0
        # Nothing was looked up: caching is off, or the request asked for that.
        self.lookup_off: int = 0

    def add(self, other: "PromptSplit") -> None:
        self.hit += other.hit
        self.external += other.external
        self.limited_by_group += other.limited_by_group
        self.draft_rule += other.draft_rule
        self.evicted += other.evicted
        self.evicted_by_call += other.evicted_by_call
        self.reset += other.reset
        self.promoted += other.promoted
        self.other_salt += other.other_salt
        self.other_adapter += other.other_adapter
        self.other_epoch += other.other_epoch
        self.other_content += other.other_content
        self.never_seen += other.never_seen
        self.shorter_than_block += other.shorter_than_block
        self.last_token_rule += other.last_token_rule
        self.lookup_off += other.lookup_off

    def as_dict(self) -> dict[str, int]:
        """Every part under its name, in the order of the prompt."""
        return {
            "hit": self.hit,
            "external": self.external,
            "limited_by_group": self.limited_by_group,
            "draft_rule": self.draft_rule,
            "evicted": self.evicted,
            "evicted_by_call": self.evicted_by_call,
            "reset": self.reset,
            "promoted": self.promoted,
            "other_salt": self.other_salt,
            "other_adapter": self.other_adapter,
            "other_epoch": self.other_epoch,
            "other_content": self.other_content,
            "never_seen": self.never_seen,
            "shorter_than_block": self.shorter_than_block,
            "last_token_rule": self.last_token_rule,
            "lookup_off": self.lookup_off,
        }

    def num_tokens(self) -> int:
        """All tokens of the prompt."""
        return sum(self.as_dict().values())


class PromptAccount(Record):
    """One admitted request. `is_resumed`: it was preempted before, so its prompt is all that it had generated as well.

    `num_blocks_short`: blocks that the pool needed more to keep all of `split.evicted`. `limiting_group`: the group
    behind `split.limited_by_group`, or -1.
    """

    __match_args__ = ("request_id", "num_tokens", "is_resumed")

    def __init__(self, request_id: str, num_tokens: int, is_resumed: bool) -> None:
        self.request_id: Final = request_id
        self.num_tokens: Final = num_tokens
        self.is_resumed: Final = is_resumed
        self.split: PromptSplit = PromptSplit()
        self.num_blocks_short: int = 0
        self.limiting_group: int = -1


class MissTotals(Record):
    """Sums over requests. `tokens_kept_by[k]`: evicted tokens that curve_blocks(k) more blocks are enough to keep, and
    curve_blocks(k - 1) are not known to be.

    `limited[group]`: tokens of split.limited_by_group for each group.
    """

    __match_args__ = ("num_groups",)

    def __init__(self, num_groups: int) -> None:
        self.num_requests: int = 0
        self.num_tokens: int = 0
        self.split: PromptSplit = PromptSplit()
        self.limited: list[int] = [0] * num_groups
        self.tokens_kept_by: list[int] = [0] * NUM_CURVE_POINTS

    @property
    def num_groups(self) -> int:
        return len(self.limited)

    def add(self, account: PromptAccount) -> None:
        """Counts one request; tokens_kept_by is the caller's to raise."""
        self.num_requests += 1
        self.num_tokens += account.num_tokens
        self.split.add(account.split)
        if account.limiting_group >= 0:
            self.limited[account.limiting_group] += account.split.limited_by_group
