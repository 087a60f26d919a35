"""Texts as traffic. The tokenizer's tokens are words, so they can be counted."""

from pathlib import Path

import pytest

from kvledger.errors import ConfigError
from kvledger.replay import RequestTable, replay
from kvledger.traces.formats import open_trace
from kvledger.traces.trace_request import TraceError, TraceSession
from tests.unit.traces import samples
from tests.unit.traces.recordings import write
from tests.unit.traces.words import tokenizer_file


def sessions(directory: Path, lines: list[str], block_size: int | None = None) -> list[TraceSession]:
    reader = open_trace(write(directory, *lines), trace_block_size=block_size, tokenizer=str(tokenizer_file(directory)))
    try:
        return list(reader.sessions())
    finally:
        reader.lines.close()


def test_every_answer_is_a_request_with_all_before_it(tmp_path: Path) -> None:
    first, second = sessions(tmp_path, samples.SHAREGPT, 2)
    # user a b c | assistant d e | user f | assistant g: with its role, a message of n words has n + 1 tokens.
    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in first.requests] == [(4, 3), (9, 2)]
    assert [len(request.hash_ids) for request in first.requests] == [2, 4]
    assert first.requests[1].hash_ids[:2] == first.requests[0].hash_ids
    # The same question in another conversation is the same blocks.
    assert second.requests[0].hash_ids == first.requests[0].hash_ids
    # The answer fills the rest of the fifth token's block, and one more: they are the next prompt's.
    assert first.requests[0].output_ids == first.requests[1].hash_ids[2:3]
    assert first.start is None


def test_the_same_block_behind_another_start_is_another_block(tmp_path: Path) -> None:
    lines = [
        samples.line(conversations=[{"from": "human", "value": value}, {"from": "gpt", "value": "z"}])
        for value in ("a b c", "x b c")
    ]
    one, two = sessions(tmp_path, lines, 2)
    assert not set(one.requests[0].hash_ids) & set(two.requests[0].hash_ids)


def test_wildchat_has_starts(tmp_path: Path) -> None:
    first, second = sessions(tmp_path, samples.WILDCHAT)
    assert (first.start, second.start) == (0.0, 30.0)
    assert (first.requests[0].num_prompt_tokens, first.requests[0].num_output_tokens) == (3, 4)


def test_a_batch_is_requests_of_their_own(tmp_path: Path) -> None:
    one, two = sessions(tmp_path, samples.OPENAI_BATCH)
    assert (one.requests[0].num_prompt_tokens, one.requests[0].num_output_tokens) == (5, 20)
    assert (two.requests[0].num_prompt_tokens, two.requests[0].num_output_tokens) == (3, 3)
    assert one.start == two.start == 0.0


def test_texts_of_aiperf_are_what_is_new_or_whole_histories(tmp_path: Path) -> None:
    first, second, own, third = sessions(tmp_path, samples.AIPERF_TEXTS)
    # 17 tokens, then 17 + 4 + 17: one block is shared, and the answer fills none.
    assert [request.num_prompt_tokens for request in first.requests] == [17, 38]
    assert first.requests[1].hash_ids[:1] == first.requests[0].hash_ids
    assert first.requests[0].output_ids == []
    assert [request.think_time for request in first.requests] == [0.0, 2.0]
    # A role and 20 words; then that, two tokens of the answer and two of the question.
    assert [request.num_prompt_tokens for request in second.requests] == [21, 25]
    assert second.requests[1].hash_ids == second.requests[0].hash_ids
    assert (second.start, second.requests[1].arrival_time) == (0.5, 2.0)
    assert (own.start, own.requests[0].num_prompt_tokens, own.requests[0].hash_ids) == (9.0, 1, [])
    # Two tokens, an answer of two, two more.
    assert (third.start, [request.num_prompt_tokens for request in third.requests]) == (None, [2, 6])


def test_an_answer_is_hit_when_it_comes_back(tmp_path: Path) -> None:
    """32 letters are two blocks; the answer of 33 fills two more, but its last token is computed by nobody."""
    lines = [
        samples.line(session_id="a", timestamp=0, text_input="a " * 32, output_length=33),
        samples.line(session_id="a", delay=1000, text_input="b", output_length=1),
    ]
    path, words = write(tmp_path, *lines), str(tokenizer_file(tmp_path))
    for how in ({"hash": "sha256"}, {"hash": "none"}):
        table = RequestTable()
        replay(path, tokenizer=words, closed_loop=True, block_size=16, listeners=[table], **how)
        assert table.columns["prompt_tokens"] == [32, 66]
        assert table.columns["hit_tokens"] == [0, 64]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"session_id": "a", "output_length": 2}, "field input_length: expected one of input_length, text_input and"),
        ({"text_input": "a", "input_length": 3}, "field input_length: expected one of .* got 2 of them"),
        ({"session_id": "s", "input_length": 3, "delay": 1}, "expected either texts or lengths in all turns"),
        ({"text_input": ""}, "field text_input: expected 1 to 33554432 tokens, got 0"),
    ],
)
def test_rows_of_aiperf_that_are_broken(row: dict[str, object], message: str, tmp_path: Path) -> None:
    lines = [samples.line(session_id="s", text_input="a", output_length=1), samples.line(**row)]
    with pytest.raises(TraceError, match=f"line 2, {message}" if message.startswith("field") else message):
        sessions(tmp_path, lines)


def test_a_text_among_lengths_asks_for_a_tokenizer(tmp_path: Path) -> None:
    reader = open_trace(write(tmp_path, samples.AIPERF_TEXTS[0]))
    with pytest.raises(TraceError, match="line 1, field text_input: is a text: say with --tokenizer"):
        list(reader.sessions())
    reader.close()


@pytest.mark.parametrize("content", ["", "{}", "no tokenizer"])
def test_what_is_no_tokenizer_is_named(content: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer='.*tokenizer.json': no tokenizer can be read from it"):
        open_trace(write(tmp_path, *samples.SHAREGPT), tokenizer=str(path))
    with pytest.raises(ConfigError, match="a bailian trace has no texts; leave it out"):
        open_trace(write(tmp_path, *samples.BAILIAN), tokenizer=str(path))
