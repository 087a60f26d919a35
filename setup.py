"""Compiles the core with mypyc; everything else about the package is in pyproject.toml.

KVLEDGER_PURE=1 installs the same sources uncompiled. A machine without a C compiler gets the pure build too, with one
line that says so. KVLEDGER_OPT_LEVEL (0 to 3) trades build time for speed while developing.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

PACKAGE = Path("src/kvledger")
# Layers 1 to 6, one compilation unit. __init__ files stay interpreted: they only re-export names.
COMPILED = sorted(
    str(path)
    for pattern in ("*.py", "managers/*.py", "scheduler/*.py")
    for path in PACKAGE.glob(pattern)
    if path.name not in ("__init__.py", "__main__.py")
)


def compiler() -> str | None:
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return shutil.which(command.split()[0])


def extensions() -> list[object]:
    if os.environ.get("KVLEDGER_PURE") == "1":
        print("kvledger: pure build, because KVLEDGER_PURE=1", file=sys.stderr)
        return []
    if compiler() is None:
        print("kvledger: pure build, because no C compiler was found; it works the same and is slower", file=sys.stderr)
        return []
    from mypyc.build import mypycify

    return mypycify(
        ["--strict", *COMPILED], opt_level=os.environ.get("KVLEDGER_OPT_LEVEL", "3"), group_name="kvledger"
    )


# setup.py is also run for metadata only (egg_info, sdist), where compiling would be wasted.
setup(ext_modules=extensions() if {"bdist_wheel", "build_ext", "build"} & set(sys.argv) else [])
