"""docs/replay.md keeps up with the command."""

import re
from dataclasses import fields
from pathlib import Path

from kvledger.cli.replay_options import ReplayOptions
from kvledger.replay.layout_file import FIELDS, read_layout
from kvledger.replay.result import GroupResult, ReplayResult
from kvledger.replay.step_time import ModelShape, gpu_names

GUIDE = (Path(__file__).parents[3] / "docs" / "replay.md").read_text(encoding="utf-8")


def test_every_option_is_explained() -> None:
    options = ["--" + option.name.replace("_", "-") for option in fields(ReplayOptions) if option.name != "trace"]
    assert [option for option in options if f"`{option}`" not in GUIDE] == []


def test_every_key_of_the_json_object_is_named() -> None:
    keys = (*ReplayResult.__struct_fields__, *GroupResult.__struct_fields__)
    assert [key for key in keys if f"`{key}" not in GUIDE] == []


def test_every_gpu_is_named() -> None:
    assert [name for name in gpu_names() if name not in GUIDE] == []


def test_the_layout_file_of_the_guide_works_and_all_kinds_are_explained() -> None:
    (example,) = re.findall(r"```json\n(\{\"groups\".*?)```", GUIDE, re.DOTALL)
    layout, _ = read_layout(example.encode(), "guide", 16, ModelShape())
    assert [len(group.layer_names) for group in layout.groups] == [8] * 5
    assert [kind for kind in FIELDS if f"| `{kind}` |" not in GUIDE] == []
