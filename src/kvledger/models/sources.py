"""Where a config comes from: a file, a directory, the bundled catalogue or the Hugging Face hub."""

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.resources import files
from pathlib import Path

from kvledger.errors import ConfigError
from kvledger.files.whole import read_whole
from kvledger.models.aliases import FORMATS, aliases, find_alias
from kvledger.models.config import JSON, ModelConfig, read_config

CATALOGUE = "data/catalogue.tsv.gz"
# Grades of a catalogue row that are copies of the model's own file; the others are marked when they are used.
COPIED_GRADES = ("verbatim", "verbatim-fixture")
# How long the hub may take to answer.
HUB_SECONDS = 4
# Of the largest number that a config can mean.
MAX_DIGITS = 18


@dataclass(frozen=True)
class CatalogueRow:
    """One bundled model: its config and where that was read."""

    name: str
    grade: str
    source: str
    config: JSON
    hf_quant: JSON | None


def parse_object(text: str | bytes, where: str) -> JSON:
    """A JSON object. ConfigError names the place when it is none. Numbers that measure nothing, such as Infinity or
    1e308, stay text, so that whoever needs that field says what stands there."""
    try:
        parsed: object = json.loads(text, parse_int=_whole, parse_float=_decimal, parse_constant=str)
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{where}: not JSON ({problem}); give a Hugging Face config.json") from None
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{where}: not a JSON object; give a Hugging Face config.json")
    return parsed


def _whole(digits: str) -> int | str:
    return int(digits) if len(digits) <= MAX_DIGITS else digits


def _decimal(digits: str) -> float | str:
    value = float(digits)
    return value if abs(value) < 10**MAX_DIGITS else digits


# Names that have at least this share of their letters in common, in order, are similar.
ALIKE = 0.6


@cache
def catalogue_lines() -> dict[str, str]:
    """Lower-case name -> the row as text; rows are parsed when they are asked for."""
    packed = (files("kvledger.models") / CATALOGUE).read_bytes()
    rows = (line.split("\t", 1) for line in gzip.decompress(packed).decode().splitlines())
    return {name.lower(): f"{name}\t{row}" for name, row in rows}


def catalogue_row(line: str) -> CatalogueRow:
    name, text = line.split("\t", 1)
    row = parse_object(text, name)
    config, quant = row["config"], row.get("hf_quant")
    assert isinstance(config, Mapping)
    return CatalogueRow(
        name, str(row["grade"]), str(row["source"]), config, quant if isinstance(quant, Mapping) else None
    )


def catalogue() -> Iterator[CatalogueRow]:
    """Every bundled model."""
    return map(catalogue_row, catalogue_lines().values())


def find_in_catalogue(name: str) -> CatalogueRow | None:
    """The bundled model of that hub id, or of that name after the slash where only one has it."""
    lines = catalogue_lines()
    asked = name.lower()
    found = [line for key, line in lines.items() if key == asked or key.split("/")[-1] == asked]
    if not found:
        # meta-llama/Meta-Llama-3.1-8B is the older name of meta-llama/Llama-3.1-8B.
        found = [line for key, line in lines.items() if key.replace("/meta-", "/") == asked.replace("/meta-", "/")]
    return catalogue_row(found[0]) if len(found) == 1 else None


def load_config(name: str, *, offline: bool = False) -> ModelConfig:
    """The config of a model given as a file, a directory, a hub id or a catalogue name.

    ConfigError says where it was looked for and what would be accepted. `offline`: never ask the hub, whose file goes
    before a bundled one of that id where the hub answers.
    """
    path = Path(name)
    # A pipe is read like a file.
    if path.exists() and not path.is_dir():
        return load_file(path, path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{name}: the directory has no config.json; give the model's own directory")
        return load_file(path / "config.json", path.name)
    bundled = find_bundled(name)
    if bundled is not None:
        asked = None if offline or "/" not in name else reachable(name)
        return bundled if asked is None else noting_differences(asked, bundled)
    if name.endswith(".json") or name.count("/") != 1:
        close = near_names(name)
        raise ConfigError(
            f"model={name!r}: no such file, directory or catalogue entry; give a path to a config.json, a directory "
            f"with one, or a hub id like owner/name{close}"
        )
    if offline:
        raise ConfigError(
            f"model={name!r}: not in the bundled catalogue; give a path to its config.json{near_names(name)}"
        )
    return from_hub(name)


def find_bundled(name: str) -> ModelConfig | None:
    """The bundled config of that name, or one with the layers of a bundled model."""
    row = find_in_catalogue(name)
    if row is not None:
        return from_catalogue(row)
    alias = find_alias(name)
    if alias is None:
        return None
    base = find_in_catalogue(alias.base)
    assert base is not None, alias
    quantized = any(change in FORMATS for change in alias.changes)
    config = read_config(alias.name, f"bundled catalogue: {base.source}", alias.config(base.config))
    config.hf_quant = None if quantized else base.hf_quant
    changes = f", with {' '.join(alias.changes)}" if alias.changes else ""
    config.note(f"{alias.name} is planned as the bundled {base.name}, whose layers it has{changes}")
    return config


def reachable(name: str) -> ModelConfig | None:
    """The hub's config; None without the extra, a network or the right to read it."""
    if not hub_answers():
        return None
    try:
        return from_hub(name)
    except ConfigError:
        return None


@cache
def hub_answers() -> bool:
    """Whether the hub is there. Asked once, in one try: its own downloads try for a minute, and say so each time."""
    try:
        from huggingface_hub import constants, get_session
    except ImportError:
        return False
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # whatever its HTTP client raises, which depends on its version
        return False
    return True


def noting_differences(asked: ModelConfig, bundled: ModelConfig) -> ModelConfig:
    """The hub's config, and in which of the fields that are planned by the bundled one is another."""
    differing = sorted(
        name
        for where, known in ((asked.root, bundled.root), (asked.text, bundled.text))
        for name, value in known.items()
        if not isinstance(value, Mapping) and where.get(name) != value
    )
    if differing:
        names = ", ".join(dict.fromkeys(differing))
        asked.note(f"the hub's config of {asked.name} is planned; the bundled one differs in {names}")
    return asked


def near_names(name: str) -> str:
    """Up to three catalogue names that are spelled most alike, with the owner or without, as a hint."""
    asked = name.lower()
    alike: dict[str, float] = {}
    names = [line.split("\t", 1)[0] for line in catalogue_lines().values()]
    for known in (*names, *(alias.name for alias in aliases().values())):
        compared = known.lower() if "/" in asked else known.lower().split("/")[-1]
        ratio = SequenceMatcher(None, asked, compared).ratio()
        if ratio >= ALIKE:
            alike[known] = ratio
    near = sorted(alike, key=lambda found: -alike[found])[:3]
    return f" (bundled and similar: {', '.join(near)})" if near else ""


def from_catalogue(row: CatalogueRow) -> ModelConfig:
    config = read_config(row.name, f"bundled catalogue: {row.source}", row.config)
    config.hf_quant = row.hf_quant
    if row.grade not in COPIED_GRADES:
        config.note(f"the bundled config of {row.name} is not a copy of the model's own file ({row.grade})")
    return config


def load_file(path: Path, name: str) -> ModelConfig:
    """A config.json on disk, with the quantization and weight index files beside it."""
    config = read_config(name, str(path), parse_object(read_whole("model", str(path)), str(path)))
    quant = path.parent / "hf_quant_config.json"
    if quant.is_file():
        config.hf_quant = parse_object(read_whole("model", str(quant)), str(quant))
    index = path.parent / "model.safetensors.index.json"
    if index.is_file():
        config.index_bytes = index_total(parse_object(read_whole("model", str(index)), str(index)))
    return config


def index_total(index: JSON) -> int | None:
    """Bytes of all weight files, as the checkpoint's index states them."""
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    return int(total) if isinstance(total, int | float) else None


def from_hub(name: str) -> ModelConfig:
    """The config of a hub repository. ConfigError when the extra is missing or the hub does not answer."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import EntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"model={name!r}: not in the bundled catalogue, and asking the hub needs the models extra: "
            f"pip install 'kvledger[models]', or give a path to its config.json{near_names(name)}"
        ) from None

    def read(file: str) -> JSON:
        # Without a network, what was downloaded before is still there.
        path = hf_hub_download(name, file, etag_timeout=HUB_SECONDS, local_files_only=not hub_answers())
        return parse_object(read_whole("model", path), f"{name}, {file}")

    try:
        config = read_config(name, f"hub: {name}", read("config.json"))
        for side_file in ("hf_quant_config.json", "model.safetensors.index.json"):
            try:
                found = read(side_file)
            except EntryNotFoundError:
                continue
            if side_file == "hf_quant_config.json":
                config.hf_quant = found
            else:
                config.index_bytes = index_total(found)
    except OSError as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not hub_answers():
            first_line = "it cannot be reached, and nothing of this id was downloaded before"
        raise ConfigError(
            f"model={name!r}: not in the bundled catalogue and the hub did not give its config ({first_line}); check "
            f"the id, the network and HF_TOKEN ({'set' if os.environ.get('HF_TOKEN') else 'not set'}), or give a path"
        ) from None
    return config
