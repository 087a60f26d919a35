"""docs/replay.md keeps up with the command."""

import re
from dataclasses import fields
from pathlib import Path

from kvledger.cli.engine_options import PLANNED_ENGINE_FIELDS, PlannedEngineOptions
from kvledger.cli.replay_options import ReplayOptions
from kvledger.replay.layout_file import FIELDS, read_layout
from kvledger.replay.result import GroupResult, ReplayResult
from tests.unit.replay.engines import LLAMA, LLAMA_WORK

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "replay.md").read_text(encoding="utf-8")
PLAN_GUIDE = (DOCS / "plan.md").read_text(encoding="utf-8")


def test_every_option_is_explained_and_those_of_an_engine_in_one_place() -> None:
    for options, guide in ((PlannedEngineOptions, PLAN_GUIDE), (ReplayOptions, GUIDE)):
        names = {option.name for option in fields(options)} - {"trace"}
        if options is ReplayOptions:
            names -= set(PLANNED_ENGINE_FIELDS)
        assert [name for name in names if f"`--{name.replace('_', '-')}" not in guide] == []


def test_every_key_of_the_json_object_is_named() -> None:
    keys = (*ReplayResult.__struct_fields__, *GroupResult.__struct_fields__)
    assert [key for key in keys if f"`{key}" not in GUIDE] == []


def test_the_layout_file_of_the_guide_works_and_all_kinds_are_explained() -> None:
    (example,) = re.findall(r"```json\n(\{\"groups\".*?)```", GUIDE, re.DOTALL)
    layout, _ = read_layout(example.encode(), "guide", LLAMA, LLAMA_WORK)
    assert [len(group.layer_names) for group in layout.groups] == [8] * 5
    assert [kind for kind in FIELDS if f"| `{kind}` |" not in GUIDE] == []
