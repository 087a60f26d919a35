"""Turns, medians, ratios, and the report made of them."""

import json

from benchmarks.peers.case import QUESTIONS, Case
from benchmarks.peers.contest import Measured, Row, in_turns, quick, run_case
from benchmarks.peers.peers import left_out
from benchmarks.peers.report import as_json, markdown, quantity
from tests.unit.benchmarks.opponents import Scripted

CASE = Case("free", "512 tokens", 3)


def test_contestants_take_turns_of_eight_runs() -> None:
    ours, theirs = Scripted("ours", [1.0] * 10), Scripted("theirs", [5.0] * 10)
    mine, other = in_turns((ours, theirs), 10, 2.0)
    assert ours.log == theirs.log == ["burst of 8", "burst of 2"]
    assert (mine, other) == (Measured(2.0, 0.0), Measured(10.0, 0.0))


def test_the_spread_is_the_distance_of_the_quartiles_as_a_share_of_the_median() -> None:
    (measured,) = in_turns((Scripted("ours", [10.0, 20.0, 30.0]),), 3, 1.0)
    assert measured == Measured(20.0, 1.0)


def test_nanoseconds_of_a_run_become_microseconds_of_an_operation() -> None:
    case = Case("decode_step", "2 running", 3, per=2)
    ours, theirs = Scripted("ours", [3000.0] * 3), Scripted("vllm", [12_000.0] * 3)
    (row,) = run_case(case, ours, [theirs], lambda name, case: f"{name} is late")
    assert (row.ours.value, row.theirs, row.ratio) == (1.5, Measured(6.0, 0.0), 4.0)
    assert (row.peer, row.peer_version, row.remark) == ("vllm", "vllm 1.0", "vllm is late")
    assert ours.log == theirs.log == ["open", "burst of 3", "close"]


def test_bytes_stay_bytes() -> None:
    case = Case("memory", "100 blocks", 1, "B", 100)
    (row,) = run_case(case, Scripted("ours", [7200.0]), [], left_out)
    assert (row.ours.value, row.theirs, row.ratio) == (72.0, None, None)


def test_a_peer_without_the_case_has_no_row_and_costs_no_run() -> None:
    ours, theirs = Scripted("ours", []), Scripted("dynamo", [], leaves_out=("512 tokens",))
    assert list(run_case(CASE, ours, [theirs], left_out)) == []
    assert ours.log == theirs.log == []


def test_quick_leaves_out_what_is_large() -> None:
    sizes = [case.size for case in quick(QUESTIONS["pool_build"].cases + QUESTIONS["scheduler_step"].cases)]
    assert sizes == ["10k blocks", "256 running, 1 group", "256 running, 6 groups"]


def test_no_two_cases_of_a_question_have_the_same_name() -> None:
    for name, question in QUESTIONS.items():
        sizes = [case.size for case in question.cases]
        assert len(set(sizes)) == len(sizes) > 0, name
        assert {case.question for case in question.cases} == {name}


def test_a_peer_that_does_less_is_marked_and_one_that_does_it_all_is_not() -> None:
    cases = QUESTIONS["block_table"].cases
    new_row = next(case for case in cases if case.variant == "new")
    slots = next(case for case in cases if case.variant == "slots")
    assert left_out("vllm", new_row) == ""
    assert "GPU kernel" in left_out("vllm", slots)
    assert "instead of hashing" in left_out("sglang", QUESTIONS["admission"].cases[0])


ROWS = [
    Row("free", "512 tokens", "us", 40, Measured(2.0, 0.1), "vllm", "vLLM 0.32.0", Measured(8.0, 0.05)),
    Row("free", "32k tokens", "us", 40, Measured(50.0, 0.1), "sglang", "SGLang 1", Measured(25.0, 0.2), "no hashes"),
    Row("memory", "1M blocks", "B", 1, Measured(72.0, 0.0)),
]


def test_a_table_for_people() -> None:
    assert markdown(["a CPU", "kvledger 1"], ROWS).splitlines() == [
        "a CPU, kvledger 1",
        "",
        "| what | case | ours | +- | peer | theirs | +- | ratio |",
        "|---|---|---:|---:|---|---:|---:|---:|",
        "| free | 512 tokens | 2 us | 10% | vLLM 0.32.0 | 8 us | 5% | 4.0x |",
        "|  | 32k tokens | 50 us | 10% | SGLang 1 | 25 us | 20% | 0.5x [1] |",
        "| memory | 1M blocks | 72 B |  |  |  |  |  |",
        "",
        "[1] no hashes",
    ]


def test_an_array_for_programs() -> None:
    first, second, third = json.loads(as_json(["a CPU"], ROWS))
    assert (first["question"], first["size"], first["ours"], first["unit"]) == ("free", "512 tokens", 2.0, "us")
    assert (first["peer"], first["peer_version"], first["peer_value"], first["ratio"]) == (
        "vllm",
        "vLLM 0.32.0",
        8.0,
        4.0,
    )
    assert (first["left_out_by_peer"], second["left_out_by_peer"]) == (None, "no hashes")
    assert (third["peer"], third["ratio"], third["machine"]) == (None, None, ["a CPU"])


def test_quantities_are_in_units_that_suit() -> None:
    assert [quantity(value, "us") for value in (0.1234, 999.0, 1500.0, 2_500_000.0)] == [
        "0.123 us",
        "999 us",
        "1.5 ms",
        "2.5 s",
    ]
