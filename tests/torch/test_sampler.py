"""Sampler: what is drawn, from what, and that drafts change nothing about it."""

from collections import Counter
from itertools import pairwise
from math import sqrt

import pytest
import torch

from kvledger.engine.ngram_drafter import NgramDrafter
from kvledger.engine.sampler import SampledRows, Sampler
from kvledger.engine.sampling_params import GREEDY, SamplingParams
from kvledger.errors import KVLedgerError

# A vocabulary of five tokens with these chances at temperature 1.
CHANCES = [0.5, 0.25, 0.15, 0.08, 0.02]
LOGITS = torch.tensor(CHANCES).log()


def rows(request_id: str, params: SamplingParams, position: int = 0, drafts: tuple[int, ...] = ()) -> SampledRows:
    return SampledRows(request_id, params, position, drafts)


def drawn(params: SamplingParams, num_draws: int, logits: torch.Tensor = LOGITS) -> Counter[int]:
    """So many tokens of one request, one at each position."""
    sampled = Sampler().sample(
        logits.expand(num_draws, -1), [rows("a", params, position) for position in range(num_draws)]
    )
    return Counter(tokens[0] for tokens in sampled)


def assert_follows(counts: Counter[int], chances: list[float]) -> None:
    """Each count within five standard deviations of its mean; the seed is fixed, so the result is always the same."""
    num_draws = sum(counts.values())
    for token_id, chance in enumerate(chances):
        mean = num_draws * chance
        assert abs(counts[token_id] - mean) <= 5 * sqrt(mean * (1 - chance)), (token_id, counts[token_id], mean)


def test_greedy_takes_the_best_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]])
    assert Sampler().sample(logits, [rows("a", GREEDY), rows("b", GREEDY, 9)]) == [[1], [0]]


def test_tokens_are_drawn_with_the_models_chances() -> None:
    assert_follows(drawn(SamplingParams(1.0, seed=1), 10_000), CHANCES)


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 2.0):
        raised = [chance ** (1 / temperature) for chance in CHANCES]
        assert_follows(drawn(SamplingParams(temperature, seed=2), 10_000), [chance / sum(raised) for chance in raised])


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    assert_follows(drawn(SamplingParams(1.0, top_k=2, seed=3), 5_000), [2 / 3, 1 / 3, 0, 0, 0])
    # 0.5 and 0.25 hold less than 0.8, so the third stays; the others go.
    assert_follows(drawn(SamplingParams(1.0, top_p=0.8, seed=3), 5_000), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0, 0])
    # 0.75 is held by two exactly.
    assert_follows(drawn(SamplingParams(1.0, top_p=0.75, seed=3), 5_000), [2 / 3, 1 / 3, 0, 0, 0])
    # top_k first: of the two that are left, the first holds two thirds.
    assert_follows(drawn(SamplingParams(1.0, top_p=0.6, top_k=2, seed=3), 500), [1.0, 0, 0, 0, 0])
    assert drawn(SamplingParams(1.0, top_p=1e-9, seed=3), 50) == {0: 50}


def test_equal_chances_are_drawn_equally() -> None:
    assert_follows(drawn(SamplingParams(1.0, seed=4), 8_000, torch.zeros(8)), [1 / 8] * 8)
    assert_follows(drawn(SamplingParams(1.0, top_k=4, seed=4), 8_000, torch.zeros(8)), [1 / 4] * 4 + [0] * 4)


def test_a_token_without_a_chance_is_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")])
    assert set(drawn(SamplingParams(1.0, seed=5), 500, logits)) == {1, 3}
    assert set(drawn(SamplingParams(1.0, top_p=0.99, seed=5), 500, logits)) == {1, 3}


def test_a_request_draws_the_same_in_every_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    hot, cut = SamplingParams(1.5, seed=8), SamplingParams(1.0, top_p=0.9, top_k=20, seed=9)
    requests = [rows("a", hot, 3), rows("b", cut, 7), rows("c", GREEDY), rows("d", hot, 3), rows("e", cut, 8)]
    together = Sampler().sample(logits[:5], requests)
    for index, request in enumerate(requests):
        assert Sampler().sample(logits[index : index + 1], [request]) == [together[index]]
    # Neither the id nor what was drawn before counts; seed and position do.
    assert Sampler().sample(logits[:1], [rows("x", hot, 3)]) == [together[0]]
    others = [Sampler().sample(logits[:1], [rows("a", hot, position)])[0][0] for position in range(20)]
    assert len(set(others)) > 5


def test_without_a_seed_the_workers_seed_and_the_id_stand_in() -> None:
    params = SamplingParams(1.0)
    logits = torch.zeros(20, 50)

    def text(sampler: Sampler, request_id: str) -> list[int]:
        asked = [rows(request_id, params, position) for position in range(20)]
        return [tokens[0] for tokens in sampler.sample(logits, asked)]

    assert text(Sampler(1), "a") == text(Sampler(1), "a")
    assert text(Sampler(1), "a") != text(Sampler(1), "b")
    assert text(Sampler(1), "a") != text(Sampler(2), "a")


# A language of five tokens: row t says what follows token t.
torch.manual_seed(3)
LANGUAGE = torch.randn(5, 5) * 1.5


def told(params: SamplingParams, num_tokens: int, num_drafts: int) -> tuple[list[int], int, int]:
    """A text of the language, with ngram drafts; and how many drafts there were and were accepted."""
    drafter = NgramDrafter(max(1, num_drafts), 1, 2)
    text, proposed, accepted = [0], 0, 0
    while len(text) <= num_tokens:
        drafts = drafter.propose(text, num_drafts)
        logits = LANGUAGE[[text[-1], *drafts]]
        [sampled] = Sampler().sample(logits, [rows("a", params, len(text), tuple(drafts))])
        text += sampled
        proposed += len(drafts)
        accepted += len(sampled) - 1
    return text[: num_tokens + 1], proposed, accepted


@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(1.0, seed=6), SamplingParams(0.7, top_p=0.9, seed=6), SamplingParams(1.3, top_k=3, seed=6)],
)
def test_a_text_is_the_same_with_and_without_drafts(params: SamplingParams) -> None:
    plain, _, _ = told(params, 300, 0)
    for num_drafts in (1, 4):
        drafted, proposed, accepted = told(params, 300, num_drafts)
        assert drafted == plain
        assert accepted > 0
        assert params.is_greedy or accepted < proposed


def test_verified_texts_follow_the_models_chances() -> None:
    """As the rejection sampling of speculative decoding asks: whatever was drafted, each token follows the row of the
    token before it, among them those that took the place of a rejected draft."""
    text, proposed, accepted = told(SamplingParams(1.0, seed=11), 8_000, 3)
    assert 0.2 < accepted / proposed < 0.8
    for before in range(5):
        follows = Counter(after for here, after in pairwise(text) if here == before)
        assert sum(follows.values()) > 200
        assert_follows(follows, LANGUAGE[before].softmax(0).tolist())


def test_a_draft_is_accepted_with_its_chance_and_replaced_by_the_others() -> None:
    params = SamplingParams(1.0, seed=12)
    for draft in range(3):
        asked = [rows("a", params, position, (draft,)) for position in range(6_000)]
        sampled = Sampler().sample(LOGITS.expand(12_000, -1), asked)
        accepted = sum(len(tokens) == 2 for tokens in sampled)
        chance = CHANCES[draft]
        assert_follows(Counter({0: accepted, 1: 6_000 - accepted}), [chance, 1 - chance])
        replaced = Counter(tokens[0] for tokens in sampled if len(tokens) == 1)
        others = [0.0 if token_id == draft else CHANCES[token_id] / (1 - chance) for token_id in range(5)]
        assert_follows(replaced, others)


def test_an_unknown_draft_is_rejected_and_costs_nothing() -> None:
    params = SamplingParams(1.0, seed=13)
    [with_unknown] = Sampler().sample(LOGITS.expand(3, -1), [rows("a", params, 4, (-1, -1))])
    [without] = Sampler().sample(LOGITS.expand(1, -1), [rows("a", params, 4)])
    assert with_unknown == without


def test_no_requests_no_tokens() -> None:
    assert Sampler().sample(torch.zeros(0, 5), []) == []


def test_rows_that_do_not_belong_to_the_requests_are_refused() -> None:
    with pytest.raises(KVLedgerError, match=r"logits of shape \[2, 5\]: the requests need 3 rows"):
        Sampler().sample(torch.zeros(2, 5), [rows("a", GREEDY, 0, (1, 2))])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0)])
def test_logits_that_are_not_numbers_name_their_request(params: SamplingParams) -> None:
    logits = torch.zeros(3, 5)
    logits[2, 1] = float("nan")
    with pytest.raises(KVLedgerError, match="request 'b': the model's logits are NaN"):
        Sampler().sample(logits, [rows("a", params), rows("b", params, 5, (3,))])
