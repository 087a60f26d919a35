"""A whole run: contestants started, questions asked, rows yielded."""

import gzip
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.peers.case import QUESTIONS, WHOLE_REPLAYS, Case
from benchmarks.peers.contest import Opponent, Row, quick, run_case
from benchmarks.peers.peers import left_out
from benchmarks.peers.process import ContestantError, ContestantProcess
from benchmarks.peers.workload import BLOCK_SIZE, write_prompts
from kvledger import Sha256BlockHasher
from kvledger.traces.formats import open_trace, sample_path
from kvledger.traces.prompts import TokenPrompts

# Longer prompts would not fit in a replay's pool.
_MAX_PROMPT_TOKENS = 60_000


class BenchRun:
    """`interpreters`: of the peers, by name. `decides_as`: the release of vLLM whose decisions ours makes. `trace`: a
    Mooncake trace in place of the bundled sample. `failures`: filled by run() with peers that did not start or failed.
    """

    def __init__(
        self,
        questions: Iterable[str],
        interpreters: dict[str, str],
        decides_as: str,
        *,
        is_quick: bool,
        trace: str | None = None,
    ) -> None:
        self._trace: Final = trace
        self._questions = [QUESTIONS[name] for name in questions]
        self._interpreters = interpreters
        self.decides_as: Final = decides_as
        self._is_quick = is_quick
        self.failures: list[str] = []

    def run(self) -> Iterator[Row]:
        """Yields rows as they are measured. ContestantError when ours fails."""
        with ExitStack() as stack:
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="kvledger-bench-")))
            ours = stack.enter_context(ContestantProcess("ours"))
            peers: list[Opponent] = []
            for name, python in self._interpreters.items():
                try:
                    peers.append(stack.enter_context(ContestantProcess(name, python)))
                except ContestantError as failed:
                    self.failures.append(str(failed))
            for question in self._questions:
                print(f"measuring {question.name}", file=sys.stderr, flush=True)
                cases = quick(question.cases) if self._is_quick else question.cases
                for case in cases:
                    ready = replace(_with_trace(case, directory, self._trace), decides_as=self.decides_as)
                    yield from self._run_case(ready, ours, peers)

    def _run_case(self, case: Case, ours: Opponent, peers: list[Opponent]) -> Iterator[Row]:
        try:
            yield from run_case(case, ours, peers, left_out)
        except ContestantError as failed:
            if failed.name == ours.name:
                raise
            self.failures.append(f"{failed} (in {case.question}, {case.size})")
            peers[:] = [peer for peer in peers if peer.name != failed.name]


def _with_trace(case: Case, directory: Path, trace: str | None) -> Case:
    """The case with its traffic in a file: from the bundled trace, or a whole trace that was given."""
    if case.question != "replay":
        return case
    if case.variant in WHOLE_REPLAYS and trace is not None:
        num_requests = sum(1 for _ in open_trace(trace).requests())
        size = case.size.replace("whole sample trace", f"the {num_requests:,} requests of {Path(trace).stem}")
        return replace(case, size=size, trace=trace, num_requests=num_requests, per=num_requests)
    if case.variant in WHOLE_REPLAYS:
        # Not every peer reads compressed traces.
        path = directory / "trace.jsonl"
        path.write_bytes(gzip.decompress(Path(sample_path()).read_bytes()))
    else:
        path = directory / f"{case.num_requests}.prompts"
        write_prompts(path, _recorded_prompts(case.num_requests))
    return replace(case, trace=str(path))


def _recorded_prompts(num_requests: int) -> list[list[int]]:

    maker = TokenPrompts(Sha256BlockHasher(BLOCK_SIZE))
    found: list[list[int]] = []
    for serial, recorded in enumerate(open_trace(sample_path()).requests()):
        if recorded.num_prompt_tokens <= _MAX_PROMPT_TOKENS:
            tokens = maker.make(recorded, serial).tokens
            found.append(tokens.token_ids(0, len(tokens)))
        if len(found) == num_requests:
            break
    return found
