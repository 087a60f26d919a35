"""The claim "so many more blocks would have kept it", checked by doing it: the same requests, one after another, with
that pool."""

from hypothesis import given
from hypothesis import strategies as st

from kvledger import KVCacheManager, MissExplainer, PromptAccount
from tests.helpers import admitted, kv_config, leave

BLOCK = 4
# Prompts of three families that share starts of all lengths, within a family and across.
PROMPTS = st.lists(
    st.builds(
        lambda shared, own, family: list(range(shared)) + [1000 * family + n for n in range(own)],
        st.sampled_from([0, 0, 8, 12, 22]),
        st.integers(1, 30),
        st.integers(1, 3),
    ),
    min_size=3,
    max_size=24,
)


def served(prompts: list[list[int]], usable: int) -> list[PromptAccount]:
    """Every prompt looked up, computed and freed, in turn."""
    manager = KVCacheManager(kv_config(usable), 64)
    misses = MissExplainer(manager)
    for number, prompt in enumerate(prompts):
        leave(manager, admitted(manager, str(number), prompt))
    manager.check()
    return misses.recent()


def num_duplicates(prompts: list[list[int]]) -> int:
    """Most blocks that hold what another one holds too: the last one of a prompt that ends with a block is computed
    anew when the prompt comes again. A larger pool may keep both, so it needs a block more for each."""
    return sum(len(prompt) % BLOCK == 0 for prompt in prompts)


@given(PROMPTS, st.integers(14, 40))
def test_a_pool_with_the_blocks_that_were_missing_hits_what_was_evicted(prompts: list[list[int]], usable: int) -> None:
    for number, account in enumerate(served(prompts, usable)):
        if account.split.evicted == 0:
            assert account.num_blocks_short == 0
            continue
        assert account.num_blocks_short > 0
        before = prompts[:number]
        larger = served(prompts[: number + 1], usable + account.num_blocks_short + num_duplicates(before))[-1]
        assert larger.split.hit >= account.split.hit + account.split.evicted
        assert larger.split.evicted == 0


@given(PROMPTS, st.integers(14, 40))
def test_a_pool_that_never_evicts_misses_nothing_that_was_seen(prompts: list[list[int]], usable: int) -> None:
    for small, large in zip(served(prompts, usable), served(prompts, 24 * 14), strict=True):
        assert large.split.evicted == 0
        assert large.split.hit == small.split.hit + small.split.evicted
        assert large.split.never_seen == small.split.never_seen
