"""Measured steps set the clock: the fit finds a machine again that made them."""

import random
from contextlib import closing
from pathlib import Path
from time import monotonic

import pytest

from kvledger.errors import ConfigError
from kvledger.plan.ask import Asked
from kvledger.plan.gpus import find_gpu
from kvledger.plan.options import EngineOptions
from kvledger.replay import replay
from kvledger.replay.engine import EngineChoice, replay_engine
from kvledger.replay.layout import InputError
from kvledger.replay.step_table import fit, least_squares, read_step_table
from kvledger.replay.step_time import AttentionWork, StepTimeModel, StepWork, num_pairs
from kvledger.traces.formats import open_trace
from kvledger.traces.recording import TimedStep
from kvledger.traces.recording_log import Ended, Numbering, RecordingLog
from tests.unit.replay.engines import LLAMA_WORK

GPU = find_gpu("H100")
# Half of the layers see 1,000 tokens.
WINDOWED = StepWork(
    8 * 10**9, 8 * 10**9, 16 * 10**9,
    attention=(AttentionWork(262144.0, 65536.0), AttentionWork(262144.0, 65536.0, window=1000)),
)  # fmt: skip
HEADER = "prefill_tokens,prefill_computed,decode_requests,decode_context,milliseconds"


def steps_of(model: StepTimeModel, noise: float = 0.0) -> list[TimedStep]:
    """Prefills of all lengths, decodes of all batches, and both together."""
    draw = random.Random(1)
    made: list[TimedStep] = []
    for prefill in (0, 64, 512, 2048, 8192):
        for decode in (0, 1, 16, 128):
            if prefill + decode == 0:
                continue
            computed = 4000 if prefill else 0
            each = 2000
            local = [
                (
                    (reach.context(prefill, computed) if prefill else 0) + decode * reach.context(1, each - 1),
                    reach.pairs(prefill, computed) + decode * reach.pairs(1, each - 1),
                )
                for reach in model.reaches
            ]
            seconds = model.seconds(
                prefill + decode,
                prefill + computed + decode * each,
                num_pairs(prefill, computed) + decode * each,
                decode + (prefill > 0),
                local,
            )
            factor = 1.0 + draw.uniform(-noise, noise)
            made.append(TimedStep(prefill, computed, decode, decode * each, seconds * factor))
    return made


@pytest.mark.parametrize("work", [LLAMA_WORK, WINDOWED], ids=["full", "windowed"])
def test_the_machine_that_made_the_steps_is_found_again(work: StepWork) -> None:
    true = StepTimeModel(work, GPU, 2, 0.0035, flops_efficiency=0.43, bandwidth_efficiency=0.71)
    model, found = fit(steps_of(true), work, GPU, 2)
    assert found.overhead == pytest.approx(0.0035)
    assert (found.flops_efficiency, found.bandwidth_efficiency) == (pytest.approx(0.43), pytest.approx(0.71))
    assert found.largest_error < 1e-9
    assert found.num_steps == 19
    assert model.seconds(100, 9000, 1e6, 3) == pytest.approx(true.seconds(100, 9000, 1e6, 3))


def test_noise_is_averaged_out() -> None:
    true = StepTimeModel(LLAMA_WORK, GPU, 1, 0.002, flops_efficiency=0.5, bandwidth_efficiency=0.8)
    _, found = fit(steps_of(true, noise=0.05), LLAMA_WORK, GPU, 1)
    assert found.flops_efficiency == pytest.approx(0.5, rel=0.05)
    assert found.bandwidth_efficiency == pytest.approx(0.8, rel=0.1)
    assert found.largest_error < 0.1


def test_what_no_step_is_bound_by_stays() -> None:
    """Decodes alone say nothing of how fast a machine computes."""
    true = StepTimeModel(WINDOWED, GPU, 1, 0.001, bandwidth_efficiency=0.5)
    decodes = [step for step in steps_of(true) if step.prefill_tokens == 0]
    _, found = fit(decodes, WINDOWED, GPU, 1)
    assert (found.flops_efficiency, found.bandwidth_efficiency) == (pytest.approx(0.6), pytest.approx(0.5))
    _, found = fit(decodes[:1], WINDOWED, GPU, 1)
    assert (found.overhead, found.largest_error) == (0.0, pytest.approx(0.0, abs=1e-9))


def test_more_work_takes_more_time() -> None:
    # 100 requests faster than one, and by more than any overhead explains.
    table = [TimedStep(0, 0, 1, 100_000, 0.5), TimedStep(0, 0, 100, 4_000_000, 0.001)]
    with pytest.raises(ConfigError, match="those with more work take less time"):
        fit(table, WINDOWED, GPU, 1)


def test_least_squares() -> None:
    # 1 x + 1 y = 1, 2 x = 1
    assert least_squares([[1.0, 1.0], [2.0, 0.0]]) == [pytest.approx(0.5), pytest.approx(0.5)]
    # x = 1 and 3 x = 1: (1 + 3) / (1 + 9)
    assert least_squares([[1.0], [3.0]]) == [pytest.approx(0.4)]
    assert least_squares([[1.0, 2.0]]) is None
    assert least_squares([[1.0, 0.0]]) is None


def test_a_replay_takes_its_time_from_the_table(tmp_path: Path) -> None:
    """Steps that take what a machine without overhead takes: the replay is that of --step-overhead 0."""
    path = tmp_path / "steps.csv"
    engine = replay_engine(EngineChoice(Asked(None, None, None, EngineOptions())))
    model = StepTimeModel(engine.work, engine.gpu, engine.num_gpus, 0.0)
    rows = [
        f"{step.prefill_tokens},{step.prefill_computed},{step.decode_requests},{step.decode_context},"
        f"{step.seconds * 1000!r}"
        for step in steps_of(model)
    ]
    path.write_text("\n".join([HEADER, *rows]))
    fitted = replay(limit=20, hash="none", step_time=str(path))
    plain = replay(limit=20, hash="none", step_overhead=0.0)
    assert fitted.ttft_seconds is not None
    assert plain.ttft_seconds is not None
    assert fitted.ttft_seconds.mean == pytest.approx(plain.ttft_seconds.mean, rel=0.02)
    assert any(note.startswith("step times are fitted to 19 steps") for note in fitted.notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "0 rows; expected 1 to 100,000 under the header prefill_tokens"),
        ("a,b\n1,2\n", "line 2, column prefill_tokens: missing"),
        (f"{HEADER}\n1,0,0,0,fast\n", "line 2, column milliseconds: expected a number from 0 on, got fast"),
        (f"{HEADER}\n1.5,0,0,0,1\n", "line 2, column prefill_tokens: expected a number from 0 on, got 1.5"),
        (f"{HEADER}\n-1,0,0,0,1\n", "line 2, column prefill_tokens: expected a number"),
        (f"{HEADER}\n0,0,0,0,1\n", "line 2: expected a step with tokens that takes time"),
        (f"{HEADER}\n5,0,0,0,0\n", "line 2: expected a step with tokens that takes time"),
        (f"{HEADER}\n0,0,9,8,1\n", "line 2, column decode_context: expected 9 or more"),
    ],
)
def test_what_is_no_table_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(content)
    with pytest.raises(InputError) as raised:
        read_step_table(str(path))
    assert message in str(raised.value)


def test_a_column_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("milliseconds,prefill_tokens,decode_requests,decode_context\n2.5,7,0,0\n")
    assert read_step_table(str(path)) == [TimedStep(7, 0, 0, 0, 0.0025)]


def test_a_recording_whose_server_measured_its_steps_is_a_table(tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    table.write_text(
        "prefill_tokens,prefill_computed,decode_requests,decode_context,milliseconds\n"
        "8192,0,0,0,260.5\n0,0,64,512000,14.2\n2048,4096,64,512000,79.8\n"
    )
    log = RecordingLog(str(tmp_path / "t.jsonl.gz"), 16, Numbering(), steps=True)
    log.add_step(TimedStep(8192, 0, 0, 0, 0.2605))
    log.add(Ended(monotonic(), 32, 1, []), monotonic())
    log.add_step(TimedStep(0, 0, 64, 512000, 0.0142))
    log.add_step(TimedStep(2048, 4096, 64, 512000, 0.0798))
    log.close()
    recorded = read_step_table(str(tmp_path / "t.jsonl.gz"))
    for step, told in zip(recorded, read_step_table(str(table)), strict=True):
        assert step.seconds == pytest.approx(told.seconds)
        step.seconds = told.seconds
        assert step == told
    assert log.num_written == 1
    with closing(open_trace(str(tmp_path / "t.jsonl.gz"))) as reader:
        assert len(list(reader.requests())) == 1


def test_a_recording_without_steps_says_how_to_get_them(tmp_path: Path) -> None:
    log = RecordingLog(str(tmp_path / "t.jsonl"), 16, Numbering())
    log.add(Ended(monotonic(), 32, 1, []), monotonic())
    log.close()
    with pytest.raises(InputError, match="has no steps; KVLEDGER_RECORD_STEPS=1 records them"):
        read_step_table(str(tmp_path / "t.jsonl"))
