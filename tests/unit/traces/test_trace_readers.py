"""Reading traces: what each format means, and which line, field and expectation a broken one is reported with."""

import re
from pathlib import Path

import pytest

from kvledger.errors import ConfigError
from kvledger.traces.formats import open_trace, sample_path
from kvledger.traces.trace_request import TraceError
from tests.unit.traces.recordings import AZURE_HEADER, agent_request, all_requests, mooncake, read, session, write


class TestMooncake:
    def test_a_line_is_a_request_with_its_time_in_seconds(self, tmp_path: Path) -> None:
        (request,) = read(write(tmp_path, mooncake(timestamp=1500, prompt=600, output=7, ids=[46, 47])))
        assert request.arrival_time == 1.5
        assert (request.num_prompt_tokens, request.num_output_tokens) == (600, 7)
        assert (request.hash_ids, request.block_size, request.scope) == ([46, 47], 512, 0)

    @pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz", "trace.jsonl.xz"])
    def test_plain_and_compressed_files_read_the_same(self, tmp_path: Path, name: str) -> None:
        path = write(tmp_path, mooncake(0), "", mooncake(1000), name=name)
        assert [request.arrival_time for request in read(path)] == [0.0, 1.0]

    def test_an_output_of_nothing_still_generates_one_token(self, tmp_path: Path) -> None:
        (request,) = read(write(tmp_path, mooncake(output=0)))
        assert request.num_output_tokens == 1

    def test_another_block_size_changes_how_many_ids_are_expected(self, tmp_path: Path) -> None:
        path = write(tmp_path, mooncake(prompt=600, ids=[0, 1, 2]))
        reader = open_trace(path, trace_block_size=256)
        assert all_requests(reader)[0].block_size == 256
        reader.lines.close()

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("{", r"line 2: not a record: input data was truncated"),
            ('{"timestamp": 1}', r"line 2, field input_length: missing; expected a value"),
            (mooncake().replace("600", '"600"'), r"line 2, field input_length: expected int, got str"),
            (mooncake(prompt=0, ids=[]), r"line 2, field input_length: expected int >= 1$"),
            (mooncake(output=-3), r"line 2, field output_length: expected int >= 0$"),
            (
                mooncake(ids=[7]),
                r"line 2, field hash_ids: expected 2 ids for 600 tokens in blocks of 512 .* got 1",
            ),
            (mooncake().replace("[0, 1]", '[0, "x"]'), r"line 2, field hash_ids\[1\]: expected int, got str"),
            (
                mooncake(timestamp=50),
                r"line 2, field timestamp: 0.95 s before the line above",
            ),
        ],
    )
    def test_a_broken_line_is_named_with_its_field_and_what_was_expected(
        self, tmp_path: Path, line: str, expected: str
    ) -> None:
        path = write(tmp_path, mooncake(1000), line, mooncake(2000))
        with pytest.raises(TraceError, match=expected) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}, line 2")

    def test_skip_bad_counts_broken_lines_and_goes_on(self, tmp_path: Path) -> None:
        path = write(tmp_path, mooncake(1000), "{", mooncake(ids=[]), mooncake(50), mooncake(2000))
        reader = open_trace(path, skip_bad=True)
        assert [request.arrival_time for request in all_requests(reader)] == [1.0, 2.0]
        assert reader.lines.num_bad == 3
        reader.lines.close()


class TestAgentSessions:
    def test_ids_mean_something_within_their_session_only(self, tmp_path: Path) -> None:
        line = session(agent_request(0.0, 64, [1]))
        first, second = read(write(tmp_path, line, line))
        assert first.hash_ids == second.hash_ids
        assert first.scope != second.scope

    def test_ids_of_global_scope_mean_the_same_everywhere(self, tmp_path: Path) -> None:
        line = session(agent_request(0.0, 64, [1]), scope="global")
        first, second = read(write(tmp_path, line, line))
        assert first.scope == second.scope == 0
        assert first.session != second.session

    def test_the_tokens_behind_the_last_whole_block_have_no_id(self, tmp_path: Path) -> None:
        (request,) = read(write(tmp_path, session(agent_request(0.0, 130, [1, 2]))))
        assert (request.num_prompt_tokens, request.hash_ids) == (130, [1, 2])

    def test_a_sub_agent_runs_in_the_place_of_its_marker_behind_people(self, tmp_path: Path) -> None:
        marker = {"t": 10.0, "type": "subagent", "requests": [agent_request(2.0, 64, [5])]}
        path = write(tmp_path, session(agent_request(0.0, 64, [1]), marker, agent_request(20.0, 64, [1])))
        requests = read(path)
        assert [request.arrival_time for request in requests] == [0.0, 12.0, 20.0]
        assert [request.priority for request in requests] == [0, 1, 0]

    def test_a_think_time_that_was_not_recorded_is_the_gap_after_the_answer(self, tmp_path: Path) -> None:
        path = write(
            tmp_path,
            session(
                agent_request(0.0, 64, [1], api_time=4.0),
                agent_request(10.0, 64, [1], think_time=3.0),
                agent_request(25.0, 64, [1]),
            ),
        )
        # 10 - (0 + 4) = 6 is overruled by the recorded 3; without an api_time the whole gap counts.
        assert [request.think_time for request in read(path)] == [0.0, 3.0, 15.0]

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            (session(agent_request(0.0, 200, [1])), r"field requests\[0\].hash_ids: expected 3 ids for in=200"),
            (session({"t": 0.0, "type": "n", "out": 5}), r"field requests\[0\].in: missing"),
            (session({"t": 0.0, "type": "x", "in": 5, "out": 5}), r'field requests\[0\].type: expected "n", "s" or'),
            (session({"t": 0.0, "type": "n", "in": 0, "out": 5}), r"field requests\[0\].in: expected int >= 1"),
            (
                session(agent_request(0.0, 64, [1]), scope="local!"),
                r'field hash_id_scope: expected "local" or "global"',
            ),
        ],
    )
    def test_a_broken_session_is_named_with_the_request_in_it(self, tmp_path: Path, line: str, expected: str) -> None:
        with pytest.raises(TraceError, match="line 1, " + expected):
            read(write(tmp_path, line))

    def test_a_broken_session_is_skipped_as_one_line(self, tmp_path: Path) -> None:
        good = session(agent_request(0.0, 64, [1]))
        path = write(tmp_path, good, "{", session(agent_request(0.0, 64, [])), session(), good, name="trace.jsonl")
        reader = open_trace(path, skip_bad=True)
        assert [request.session for request in all_requests(reader)] == [1, 4]
        assert reader.lines.num_bad == 2
        reader.lines.close()


class TestAzure:
    def test_times_count_from_the_first_request_and_nothing_is_shared(self, tmp_path: Path) -> None:
        path = write(
            tmp_path, AZURE_HEADER, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:05.4799600,110,27"
        )
        first, second = read(path)
        assert (first.arrival_time, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 4808, 10)
        assert second.arrival_time == pytest.approx(1.5)
        assert first.hash_ids == second.hash_ids == []

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ("2023-11-16 18:17:03,1", "line 2: expected 3 comma-separated values, got 2"),
            ("yesterday,1,1", "line 2, field TIMESTAMP: expected a time like .* got yesterday"),
            ("2023-11-16 18:17:03.x,1,1", "line 2, field TIMESTAMP: expected a time like .* got 2023-11-16 18:17:03.x"),
            ("2023-11-16 18:17:03,0,1", "line 2, field ContextTokens: expected int from 1 to 33554432, got 0"),
            ("2023-11-16 18:17:03,1,many", "line 2, field GeneratedTokens: expected int from 0 to 33554432, got many"),
        ],
    )
    def test_a_broken_row_is_named_with_its_column(self, tmp_path: Path, row: str, expected: str) -> None:
        with pytest.raises(TraceError, match=expected):
            read(write(tmp_path, AZURE_HEADER, row, name="trace.csv"))

    def test_skip_bad_passes_over_every_kind_of_broken_row(self, tmp_path: Path) -> None:
        good, earlier = "2023-11-16 18:17:03,5,1", "2023-11-16 18:17:02,5,1"
        path = write(tmp_path, AZURE_HEADER, good, "x", "x,1,1", earlier, "2023-11-16 18:17:04,x,1", good)
        reader = open_trace(path, skip_bad=True)
        assert [request.arrival_time for request in all_requests(reader)] == [0.0, 0.0]
        assert reader.lines.num_bad == 4
        reader.lines.close()

    def test_a_named_format_still_wants_its_header(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="line 1: expected the header TIMESTAMP"):
            read(write(tmp_path, "2023-11-16 18:17:03,5,1"), format_name="azure")

    def test_an_unknown_format_is_refused_with_the_known_ones(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="format='csv': not a trace format; use one of mooncake, timed-trace"):
            open_trace(write(tmp_path, AZURE_HEADER), "csv")


class TestOpening:
    @pytest.mark.parametrize(
        ("line", "name"),
        [(mooncake(), "mooncake"), (session(agent_request(0.0, 64, [1])), "agent"), (AZURE_HEADER, "azure")],
    )
    def test_the_format_is_recognised_from_the_first_record(self, tmp_path: Path, line: str, name: str) -> None:
        reader = open_trace(write(tmp_path, "", line))
        assert reader.name == name
        reader.lines.close()

    def test_a_format_can_be_named_when_the_first_line_is_broken(self, tmp_path: Path) -> None:
        path = write(tmp_path, "garbage", mooncake())
        with pytest.raises(TraceError, match="line 1: not a trace of a known format"):
            open_trace(path)
        assert len(read(path, format_name="mooncake", skip_bad=True)) == 1

    def test_what_cannot_be_read_is_said_plainly(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"cannot be read \(No such file or directory\)"):
            open_trace(str(tmp_path / "missing.jsonl"))
        with pytest.raises(TraceError, match="the trace is empty"):
            open_trace(write(tmp_path, ""))

    def test_a_truncated_file_is_damaged_not_short(self, tmp_path: Path) -> None:
        path = Path(write(tmp_path, *[mooncake(t) for t in range(2000)], name="trace.jsonl.gz"))
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(TraceError, match=re.escape(str(path)) + r", after line \d+: the file is damaged"):
            read(str(path))

    def test_only_a_mooncake_trace_needs_its_block_size_told(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="trace_block_size=256: a trace of the agent format says so itself"):
            open_trace(write(tmp_path, session(agent_request(0.0, 64, [1]))), trace_block_size=256)

    def test_the_bundled_sample_is_1500_requests(self) -> None:
        requests = read(sample_path())
        assert len(requests) == 1500
        assert requests[0].hash_ids == list(range(14))
        assert requests[-1].arrival_time == pytest.approx(510.0, abs=0.01)
