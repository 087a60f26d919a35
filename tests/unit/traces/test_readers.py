"""What each format means: times in its units, tokens, what is shared, sessions."""

from pathlib import Path

import pytest

from kvledger.errors import ConfigError
from kvledger.traces.formats import FORMATS, open_trace
from kvledger.traces.reader import TraceReader
from kvledger.traces.trace_request import TraceError, TraceRequest, TraceSession
from tests.unit.traces import samples
from tests.unit.traces.recordings import mooncake, write


def opened(directory: Path, lines: list[str], format_name: str | None = None, **options: object) -> TraceReader:
    return open_trace(write(directory, *lines), format_name, **options)  # type: ignore[arg-type]


def requests(
    directory: Path, lines: list[str], format_name: str | None = None, **options: object
) -> list[TraceRequest]:
    reader = opened(directory, lines, format_name, **options)
    try:
        return list(reader.requests())
    finally:
        reader.lines.close()


def sessions(
    directory: Path, lines: list[str], format_name: str | None = None, **options: object
) -> list[TraceSession]:
    reader = opened(directory, lines, format_name, **options)
    try:
        return list(reader.sessions())
    finally:
        reader.lines.close()


def times(made: list[TraceRequest]) -> list[float]:
    return [request.arrival_time for request in made]


def test_every_format_has_a_sample() -> None:
    assert set(samples.SAMPLES) == set(FORMATS)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in (*samples.TEXTS, *samples.ASKED_FOR)])
def test_a_format_is_recognised_from_its_first_record(name: str, tmp_path: Path) -> None:
    reader = opened(tmp_path, samples.SAMPLES[name])
    assert reader.name == name
    reader.lines.close()


@pytest.mark.parametrize("name", samples.TEXTS)
def test_texts_need_a_tokenizer(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"tokenizer=None: a {name} trace is text.*; give the model's tokenizer.json"
    ):
        opened(tmp_path, samples.SAMPLES[name])


def test_seconds_and_milliseconds_that_cannot_be_told_apart_are_asked_for(tmp_path: Path) -> None:
    """40 tokens with 3 ids: 16 tokens an id, of a timed trace in seconds or of another tool in milliseconds."""
    with pytest.raises(
        TraceError, match=r"more than one format looks like this \(mooncake: .*; timed-trace: .* --format"
    ):
        opened(tmp_path, samples.TIMED)
    assert times(requests(tmp_path, samples.TIMED, "timed-trace")) == [0.5, 100.5]
    assert times(requests(tmp_path, samples.TIMED, "mooncake", trace_block_size=16)) == [0.0005, 0.1005]


def test_an_id_for_every_512_tokens_is_mooncakes(tmp_path: Path) -> None:
    assert times(requests(tmp_path, [mooncake(1500)])) == [1.5]


def test_whole_prompts_and_new_parts_that_cannot_be_told_apart_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"\(mooncake-sessions: .* whole prompts; aiperf: .* what is new in each turn; or texts\)"
    ):
        opened(tmp_path, samples.SESSION_ROWS)


def test_bailian_counts_in_seconds_and_16_tokens(tmp_path: Path) -> None:
    """Read as Mooncake's milliseconds, a hundred seconds were a tenth of one."""
    made = requests(tmp_path, samples.BAILIAN)
    assert times(made) == [61.0, 62.5, 161.0]
    assert [request.block_size for request in made] == [16, 16, 16]
    assert made[2].hash_ids == [7, 8, 10, 11]
    # Chat 160 goes on with 159.
    assert made[0].session == made[2].session != made[1].session
    first, second = sessions(tmp_path, samples.BAILIAN)
    assert (first.start, times(first.requests)) == (61.0, [0.0, 100.0])
    assert (second.start, times(second.requests)) == (62.5, [0.0])
    assert [request.think_time for request in first.requests] == [0.0, 100.0]


@pytest.mark.parametrize(("lines", "second"), [(samples.AZURE_2023, 0.052), (samples.AZURE_2024, 0.99007)])
def test_azure_of_both_years(lines: list[str], second: float, tmp_path: Path) -> None:
    assert times(requests(tmp_path, lines)) == [0.0, pytest.approx(second)]


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(samples.AZURE_2024).encode())
    reader = open_trace(str(path))
    assert [request.num_prompt_tokens for request in reader.requests()] == [2162, 10]
    reader.lines.close()


def test_burstgpt_leaves_failed_requests_out(tmp_path: Path) -> None:
    reader = opened(tmp_path, samples.BURSTGPT)
    made = list(reader.requests())
    reader.lines.close()
    assert [(request.arrival_time, request.num_prompt_tokens, request.num_output_tokens) for request in made] == [
        (0.0, 472, 18),
        (113.0, 417, 276),
    ]
    assert reader.notes == ["1 requests without an answer (they failed) are left out"]
    assert not reader.has_sessions


def test_burstgpts_sessions_think_between_answer_and_question(tmp_path: Path) -> None:
    first, _ = sessions(tmp_path, samples.BURSTGPT_SESSIONS)
    # Asked at 0 and answered at 4; asked again at 10.
    assert [request.think_time for request in first.requests] == [0.0, 6.0]


def test_sessions_of_whole_prompts(tmp_path: Path) -> None:
    first, second = sessions(tmp_path, samples.SESSION_ROWS, "mooncake-sessions")
    assert (first.start, second.start) == (1.0, 1.5)
    assert [(request.num_prompt_tokens, request.hash_ids, request.block_size) for request in first.requests] == [
        (600, [1, 2], 512),
        (700, [1, 5], 512),
    ]
    assert [request.think_time for request in first.requests] == [0.0, 2.0]
    assert times(first.requests) == [0.0, 2.0]


def test_sessions_of_what_is_new(tmp_path: Path) -> None:
    """600 tokens, an answer of 20, then 700 more: a prompt of 1,320."""
    first, second = sessions(tmp_path, samples.SESSION_ROWS, "aiperf")
    one, two = first.requests
    assert (one.num_prompt_tokens, two.num_prompt_tokens) == (600, 1320)
    # 512, 600 and 20 are multiples of 4.
    assert (one.block_size, len(one.hash_ids), len(two.hash_ids)) == (4, 150, 330)
    assert two.hash_ids[:150] == one.hash_ids
    # The answer of 20 tokens lies between them.
    assert two.hash_ids[150:155] == one.output_ids
    # Id 1 is the same text in both turns: its 512 tokens begin the first and, behind 620 tokens, the second.
    assert two.hash_ids[155 : 155 + 128] == one.hash_ids[:128]
    assert not set(second.requests[0].hash_ids) & set(two.hash_ids)


def test_pieces_are_the_same_in_all_sessions_so_that_they_share(tmp_path: Path) -> None:
    """The single turn of b begins with the block that the two turns of a begin with."""
    lines = [*samples.SESSION_ROWS, samples.line(session_id="c", timestamp=1600, input_length=512, hash_ids=[1])]
    first, _, third = sessions(tmp_path, lines, "aiperf")
    assert third.requests[0].block_size == first.requests[0].block_size == 4
    assert third.requests[0].hash_ids == first.requests[0].hash_ids[:128]


def test_dynamo_in_the_order_of_arrival(tmp_path: Path) -> None:
    made = requests(tmp_path, samples.DYNAMO)
    assert times(made) == [0.0, 8.0]
    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in made] == [(64, 16), (130, 4)]
    assert made[0].hash_ids[0] == made[1].hash_ids[0]
    assert made[0].session == made[1].session == 1
    # Done after one second, asked again seven seconds later.
    assert made[1].think_time == 7.0


def test_hashes_may_be_texts(tmp_path: Path) -> None:
    one, two = requests(tmp_path, samples.LITELLM)
    assert (one.arrival_time, two.arrival_time, two.think_time) == (0.0, 5.0, 3.0)
    assert one.hash_ids[0] == two.hash_ids[0]
    assert one.hash_ids[1] != two.hash_ids[1]
    assert one.block_size == 32


def test_hashes_without_a_block_size_are_asked_for(tmp_path: Path) -> None:
    lines = [text.replace(', "block_size": 32', "") for text in samples.LITELLM]
    with pytest.raises(TraceError, match="line 1, field block_size: missing: say with --trace-block-size"):
        requests(tmp_path, lines)
    assert requests(tmp_path, lines, trace_block_size=32) == requests(tmp_path, samples.LITELLM)


def test_rows_without_times_say_so(tmp_path: Path) -> None:
    reader = opened(tmp_path, samples.UNTIMED)
    assert times(list(reader.requests())) == [0.0, 0.0]
    assert reader.notes == ["the trace has no times: all requests arrive at once"]
    reader.lines.close()


def test_events_are_prompts_of_what_became_cached(tmp_path: Path) -> None:
    one, two = requests(tmp_path, samples.KV_EVENTS)
    # Two blocks, one token of the tail; the block a second later is the answer's. Group 1 tells the same again.
    assert (one.arrival_time, one.num_prompt_tokens, one.num_output_tokens) == (0.0, 9, 5)
    assert (two.arrival_time, two.num_prompt_tokens, len(two.hash_ids)) == (490.0, 13, 3)
    assert two.hash_ids[0] == one.hash_ids[0]


def test_ours(tmp_path: Path) -> None:
    one, two, three = requests(tmp_path, samples.OURS)
    assert (one.arrival_time, one.num_prompt_tokens, one.num_output_tokens, one.hash_ids) == (0.25, 40, 12, [1, 2])
    assert (one.block_size, one.scope, one.session) == (16, 3, 1)
    assert (two.think_time, two.priority) == (0.5, -1)
    assert (three.block_size, three.hash_ids, three.scope) == (512, [9], 0)


def test_a_newer_version_of_ours_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1, field version: expected 1, got 2; a newer kvledger may read it"):
        requests(tmp_path, ['{"format": "kvledger.trace", "version": 2, "block_size": 16}'])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_recording_that_was_cut_is_read_up_to_there(suffix: str, tmp_path: Path) -> None:
    path = Path(write(tmp_path, *samples.OURS, name=f"trace.jsonl{suffix}"))
    path.write_bytes(path.read_bytes()[:-9])
    reader = open_trace(str(path))
    made = list(reader.requests())
    reader.lines.close()
    assert [request.hash_ids for request in made] == [[1, 2], [1, 2], [9]][: len(made)]
    assert len(made) == (3 if suffix else 2), "of the archive only the check sum is cut off"
    assert reader.notes == ["the recording is cut at its end, as by a writer that was killed; what is whole is read"]
