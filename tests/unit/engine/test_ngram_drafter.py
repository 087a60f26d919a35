"""NgramDrafter: the longest match counts, then the first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger import pack_tokens
from kvledger.engine.ngram_drafter import NgramDrafter
from kvledger.errors import ConfigError

# Text, what follows. Lookups of 2 to 3 tokens, at most 3 drafts.
TEXTS = [
    ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5]),
    ([1, 2, 3, 9, 1, 2, 7, 1, 2], [3, 9, 1]),  # the first of two matches
    ([5, 1, 2, 3, 4, 1, 2, 8, 5, 1, 2], [3, 4, 1]),  # the longer match (5 1 2), though 1 2 occurs before it ends
    ([1, 2, 8, 0, 5, 1, 2, 3, 0, 5, 1, 2], [3, 0, 5]),  # the longer match, though a shorter one comes first
    ([1, 2, 1, 2], [1, 2]),  # what follows reaches into the last tokens, and ends with them
    ([7, 7, 7, 7], [7]),  # the n-gram overlaps itself
    ([1, 2, 3, 4], []),  # nothing occurs twice
    ([3, 1, 3], []),  # one token is less than prompt_lookup_min
    ([1], []),
]


@pytest.mark.parametrize(("text", "drafts"), TEXTS)
def test_what_follows_the_longest_and_first_match_is_proposed(text: list[int], drafts: list[int]) -> None:
    drafter = NgramDrafter(3, prompt_lookup_min=2, prompt_lookup_max=3)
    assert drafter.propose(text) == drafts
    assert drafter.propose(pack_tokens(text)) == drafts


def test_no_more_than_asked_for() -> None:
    drafter = NgramDrafter(3, 2, 3)
    text = TEXTS[0][0]
    assert [drafter.propose(text, most) for most in (-1, 0, 1, 2, 9)] == [[], [], [3], [3, 4], [3, 4, 5]]


def test_bytes_that_match_across_tokens_are_no_match() -> None:
    # Packed: 01 00 00 00 | 00 01 00 00 | 00 01 00 00; the last 4 bytes also stand at byte 3, and mean nothing there.
    assert NgramDrafter(2, 1, 1).propose([0x01000000, 0x00000100, 0x00000001, 0x00010000]) == []
    assert NgramDrafter(2, 1, 1).propose([0x0001_0000, 5, 0x0100_0000, 0x0001_0000]) == [5, 0x0100_0000]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 5),
)
def test_it_is_the_definition(text: list[int], least: int, more: int, num_drafts: int) -> None:
    expected: list[int] = []
    for length in range(least + more, least - 1, -1):
        places = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
        if places:
            expected = text[places[0] : places[0] + num_drafts]
            break
    assert NgramDrafter(num_drafts, least, least + more).propose(text) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 2), "num_speculative_tokens=0"),
        ((1, 0, 2), "prompt_lookup_min=0"),
        ((1, 3, 2), "prompt_lookup_max=2: less than prompt_lookup_min=3; raise it"),
    ],
)
def test_wrong_values_are_named(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NgramDrafter(*arguments)
