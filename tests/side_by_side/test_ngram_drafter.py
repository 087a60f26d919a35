"""Drafts from the text itself: the same as vLLM's, for random texts of few words."""

import random

import numpy
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as vllm_drafts

from kvledger.engine.ngram_drafter import NgramDrafter


def test_drafts_are_the_same() -> None:
    chance = random.Random(0)
    num_drafted = 0
    for _ in range(20_000):
        words = chance.choice([2, 3, 8])
        text = [chance.randrange(words) for _ in range(chance.randrange(1, 40))]
        least = chance.randint(1, 4)
        most = least + chance.randint(0, 4)
        num_drafts = chance.randint(1, 6)
        max_model_len = len(text) + chance.choice([0, 1, 2, 60])
        expected = vllm_drafts(numpy.array(text, dtype=numpy.int32), least, most, max_model_len, num_drafts).tolist()
        ours = NgramDrafter(num_drafts, least, most).propose(text, max_model_len - len(text))
        assert ours == expected, (text, least, most, num_drafts, max_model_len)
        num_drafted += bool(expected)
    assert num_drafted > 2_000
