"""Runs of the command whose output is compared with known numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvledger.cli import main

WHOLE_TRACE = str(Path(__file__).parent / "data" / "mooncake_conversation.jsonl.xz")


def replay(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON object that `kvledger replay ARGUMENTS --json` prints."""
    assert main(["replay", *arguments, "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    result: dict[str, Any] = json.loads(printed)
    return result
