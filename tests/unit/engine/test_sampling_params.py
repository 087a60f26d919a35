"""SamplingParams: what is refused, and how it is said."""

import pytest

from kvledger.engine.draft_verification import verify_drafts
from kvledger.engine.sampling_params import SamplingParams
from kvledger.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", 0.001),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("seed", -1),
        ("max_tokens", 0),
    ],
)
def test_a_wrong_value_is_named_with_its_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value!r}: .*; give "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_a_negative_stop_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop_token_ids=-5"):
        SamplingParams(stop_token_ids=(1, -5))


def test_temperature_0_is_greedy() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.5).is_greedy


@pytest.mark.parametrize(
    ("drafts", "tokens", "accepted"),
    [
        ([], [5], [5]),
        ([7, 9, 4], [7, 9, 2, 6], [7, 9, 2]),
        ([7, 9, 4], [7, 9, 4, 6], [7, 9, 4, 6]),
        ([7, 9, 4], [1, 9, 4, 6], [1]),
        ([-1, -1], [3, 4, 5], [3]),
    ],
)
def test_drafts_are_accepted_up_to_the_first_wrong_one(
    drafts: list[int], tokens: list[int], accepted: list[int]
) -> None:
    assert verify_drafts(tokens, drafts) == accepted
