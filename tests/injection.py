"""Exceptions where none is expected.

In an interpreted build a trace function raises at the n-th line that a call runs in the core: KeyboardInterrupt can
come at any of them. In a compiled one the n-th allocation of memory fails: MemoryError can come at any of these.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvledger
from kvledger.core.units import IS_COMPILED

CORE = str(Path(kvledger.__file__).parent / "core")


class Interruption(KeyboardInterrupt):
    """Not to be taken for a real one."""


def num_lines(call: Callable[[], object]) -> int:
    """Lines of the core that the call runs."""
    return _trace(call, 0)


def interrupt(call: Callable[[], object], line: int) -> bool:
    """Runs the call up to that line of it, the first being 1. False when it went through, because it has fewer."""
    try:
        _trace(call, line)
    except Interruption:
        return True
    return False


def _trace(call: Callable[[], object], stop_at: int) -> int:
    count = 0

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == stop_at:
                raise Interruption
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(CORE) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def starve(call: Callable[[], object], allocation: int) -> bool | None:
    """Runs the call and lets that allocation of it fail, the first being 0. Whether MemoryError came out of it; None
    when it is done before."""
    import _testcapi

    assert IS_COMPILED, "interpreted, most allocations are the interpreter's own"
    done = False
    try:
        _testcapi.set_nomemory(allocation, allocation + 1)
        try:
            call()
            done = True
        finally:
            _testcapi.remove_mem_hooks()
    except MemoryError:
        return True
    return None if done else False
