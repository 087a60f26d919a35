"""docs/generate.md keeps up with the command."""

from dataclasses import fields
from pathlib import Path

from kvledger.cli.generate_options import GenerateOptions
from tests.unit.engine.storyteller import Stage

GUIDE = (Path(__file__).parents[3] / "docs" / "generate.md").read_text(encoding="utf-8")


def test_every_option_is_explained() -> None:
    options = ["--" + option.name.replace("_", "-") for option in fields(GenerateOptions)]
    assert [option for option in options if f"`{option}" not in GUIDE] == []


def test_every_key_of_the_stats_is_named() -> None:
    assert [key for key in Stage().engine.stats.as_dict() if f"`{key}`" not in GUIDE] == []
