"""TextStream: characters come out whole, and together they are the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvledger.engine.text_stream import TextStream
from kvledger.errors import ConfigError
from tests.torch.tiny_directory import byte_tokenizer

TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def streamed(token_ids: list[int], prompt: str = "a") -> list[str]:
    """What each token brings, and what the end brings."""
    stream = TextStream(TOKENIZER, encode(prompt))
    return [stream.add([token_id]) for token_id in token_ids] + [stream.end()]


def test_a_character_of_several_tokens_comes_whole() -> None:
    assert streamed(encode("né€😀!")) == ["n", "", "é", "", "", "€", "", "", "", "😀", "!", ""]


def test_several_tokens_at_once_bring_several_characters() -> None:
    stream = TextStream(TOKENIZER, encode("prompt"))
    token_ids = encode("日本語")
    assert [stream.add(token_ids[:4]), stream.add(token_ids[4:8]), stream.add(token_ids[8:])] == ["日", "本", "語"]
    assert stream.end() == ""


def test_special_tokens_are_not_text() -> None:
    assert streamed([*encode("ab"), 0]) == ["a", "b", "", ""]


def test_a_character_that_never_becomes_whole_comes_as_what_the_tokenizer_makes_of_it() -> None:
    assert streamed(encode("a😀")[:-1]) == ["a", "", "", "", "\ufffd"]


@given(st.text(max_size=12), st.integers(0, 12), st.sampled_from(["x", "ü", "日"]))
def test_the_pieces_are_the_whole(text: str, num_cut: int, prompt: str) -> None:
    token_ids = encode(text)[: max(0, len(encode(text)) - num_cut)]
    assert "".join(streamed(token_ids, prompt)) == TOKENIZER.decode(token_ids)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer=object: cannot decode piece by piece; use a fast one"):
        TextStream(object())
