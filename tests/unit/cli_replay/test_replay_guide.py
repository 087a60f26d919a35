"""docs/replay.md keeps up with the command."""

from dataclasses import fields
from pathlib import Path

from kvledger.cli.replay_options import ReplayOptions
from kvledger.replay.result import ReplayResult
from kvledger.replay.step_time import gpu_names

GUIDE = (Path(__file__).parents[3] / "docs" / "replay.md").read_text(encoding="utf-8")


def test_every_option_is_explained() -> None:
    options = ["--" + option.name.replace("_", "-") for option in fields(ReplayOptions) if option.name != "trace"]
    assert [option for option in options if f"`{option}`" not in GUIDE] == []


def test_every_key_of_the_json_object_is_named() -> None:
    assert [key for key in ReplayResult.__struct_fields__ if f"`{key}" not in GUIDE] == []


def test_every_gpu_is_named() -> None:
    assert [name for name in gpu_names() if name not in GUIDE] == []
