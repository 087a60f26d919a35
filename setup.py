"""Compiles the core with mypyc; everything else about the package is in pyproject.toml.

KVLEDGER_PURE=1 installs the same sources uncompiled. A machine that cannot compile gets the pure build too, with one
line that says so. KVLEDGER_OPT_LEVEL (0 to 3) trades build time for speed while developing.
"""

import contextlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

# core/ is what is compiled, as one unit. __init__ files stay interpreted: they hold no code.
COMPILED = sorted(str(path) for path in Path("src/kvledger/core").rglob("*.py") if path.name != "__init__.py")


def missing_for_compiling() -> str | None:
    """What this machine lacks to compile an extension module, or None."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    # On Windows the compiler is found by setuptools and stands in no variable.
    if os.name != "nt" and shutil.which(command.split()[0]) is None:
        return f"no C compiler ({command.split()[0]})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "no Python.h (the python3-dev package)"
    return None


def announce_pure_build(why: str) -> None:
    """One line for the person who installs. pip hides what a build prints, so it goes to the terminal as well."""
    line = f"kvledger: {why}: installing the pure Python build, which decides the same and is several times slower"
    print(line, file=sys.stderr)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        print(f"\n{line}", file=terminal)


def extensions() -> list[object]:
    if os.environ.get("KVLEDGER_PURE") == "1":
        announce_pure_build("KVLEDGER_PURE=1")
        return []
    missing = missing_for_compiling()
    if missing is not None:
        announce_pure_build(missing)
        return []
    from mypyc.build import mypycify

    return mypycify(["--strict", *COMPILED], opt_level=os.environ.get("KVLEDGER_OPT_LEVEL", "3"), group_name="kvledger")


if __name__ == "__main__":
    # setup.py is also run for metadata only (egg_info, sdist), where compiling would be wasted. An editable install
    # stays pure: compiled files beside the sources would hide later edits.
    builds = bool({"bdist_wheel", "build_ext", "build"} & set(sys.argv))
    if builds:
        # An earlier build's copies would be packed once more, with modules that are gone by now.
        for copies in Path("build").glob("lib*"):
            shutil.rmtree(copies)
    setup(ext_modules=extensions() if builds else [])
