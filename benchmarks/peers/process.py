"""Both ends of the pipe to a contestant, which runs in a process and an interpreter of its own.

    first            <- {"version": "vLLM 0.32.0", "python": "3.11.7"}
    {"open": case}   -> {"ready": true}, or {"left_out": why} where the contestant has no such thing
    {"burst": 8}     -> {"values": [...]}: nanoseconds, unless the operation measures something else
    {"close": true}  -> {"ready": true}

One JSON object a line. {"error": text} in place of an answer: the contestant failed. What libraries print goes to
stderr; stdout is the pipe's.
"""

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TextIO

from benchmarks.peers.operation import Operation, burst

# A peer's interpreter has neither kvledger nor the clone that this file stands in, so that is named.
_BOOT: Final = (
    "import sys; root, name = sys.argv[1:]; sys.path.insert(0, root); "
    "from benchmarks.peers.process import serve; serve(name)"
)
_ROOT: Final = Path(__file__).parents[2]
# Threads of torch only disturb; the rest keeps engines from looking for devices and the network.
_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "DYN_LOG": "error",
}


class ContestantError(Exception):
    """A contestant did not start, or could not do what it was asked for. `name`: which one."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name: Final = name


class ContestantProcess:
    """The near end. Use it as a context."""

    def __init__(self, name: str, python: str | None = None) -> None:
        """`python`: the peer's interpreter; None: this one, with the same PYTHONPATH."""
        self.name: Final = name
        environment = {**os.environ, **_ENVIRONMENT}
        if python is not None:
            environment.pop("PYTHONPATH", None)
        command = [python or sys.executable, "-c", _BOOT, str(_ROOT), name]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        except OSError as error:
            raise ContestantError(name, str(error)) from error
        try:
            hello = self._read()
        except ContestantError:
            self.__exit__()
            raise
        self.version: Final[str] = hello["version"]
        self.python: Final[str] = hello["python"]

    def __enter__(self) -> "ContestantProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()

    def open(self, case: dict[str, Any]) -> str | None:
        """Prepares the case. Returns why the contestant leaves it out, or None when it is ready."""
        left_out: str | None = self._ask({"open": case}).get("left_out")
        return left_out

    def burst(self, num_counted: int) -> list[float]:
        values: list[float] = self._ask({"burst": num_counted})["values"]
        return values

    def close(self) -> None:
        """Drops what open() prepared."""
        self._ask({"close": True})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # It has died; the answer says so.
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ContestantError(self.name, f"ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContestantError(self.name, answer["error"])
        return answer


def serve(name: str) -> None:
    """The far end: answers until its input ends. `name`: the module in contestants/."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        contestant = import_module(f"benchmarks.peers.contestants.{name}")
        _answer(pipe, {"version": contestant.version(), "python": sys.version.split()[0]})
        _serve(pipe, contestant.prepare)
    except Exception:
        traceback.print_exc()
        _answer(pipe, {"error": traceback.format_exc().strip().splitlines()[-1]})
        sys.exit(1)


def _serve(pipe: TextIO, prepare: Callable[[dict[str, Any]], Operation | str]) -> None:
    """The garbage collector is off: it would bill an operation for what others left behind."""
    operation: Operation | str = "nothing is open"
    gc.disable()
    for line in sys.stdin:
        question = json.loads(line)
        if "open" in question:
            gc.collect()
            # What is there by now is no part of any question; what is prepared from here on is.
            gc.freeze()
            operation = prepare(question["open"])
            _answer(pipe, {"left_out": operation} if isinstance(operation, str) else {"ready": True})
        elif "burst" in question:
            assert isinstance(operation, Operation), operation
            _answer(pipe, {"values": burst(operation, question["burst"])})
        else:
            operation = "nothing is open"
            gc.unfreeze()
            gc.collect()
            _answer(pipe, {"ready": True})


def _answer(pipe: TextIO, answer: dict[str, Any]) -> None:
    pipe.write(json.dumps(answer) + "\n")
    pipe.flush()
