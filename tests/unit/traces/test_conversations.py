"""Texts as traffic. The tokenizer's tokens are words, so they can be counted."""

from pathlib import Path

import pytest

from kvledger.errors import ConfigError
from kvledger.traces.formats import open_trace
from kvledger.traces.trace_request import TraceSession
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


@pytest.mark.parametrize("content", ["", "{}", "no tokenizer"])
def test_what_is_no_tokenizer_is_named(content: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer='.*tokenizer.json': no tokenizer can be read from it"):
        open_trace(write(tmp_path, *samples.SHAREGPT), tokenizer=str(path))
    with pytest.raises(ConfigError, match="a bailian trace has no texts; leave it out"):
        open_trace(write(tmp_path, *samples.BAILIAN), tokenizer=str(path))
