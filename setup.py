"""Compiles the core with mypyc; everything else about the package is in pyproject.toml.

KVLEDGER_PURE=1 installs the same sources uncompiled. A machine that cannot compile gets the pure build too, with one
line that says so. KVLEDGER_OPT_LEVEL (0 to 3) trades build time for speed while developing.

Each module is a C file of its own, compiled by as many compilers as there are processors. Calls inlined across modules,
which one large file would allow, come from gcc when it links (-flto): fewer instructions than that file, in a third of
its time.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# core/ is what is compiled, as one unit. __init__ files stay interpreted: they hold no code.
COMPILED = sorted(str(path) for path in Path("src/kvledger/core").rglob("*.py") if path.name != "__init__.py")


OPT_LEVEL = os.environ.get("KVLEDGER_OPT_LEVEL", "3")

# Nothing calls into the library but the modules' own entry points, which Python marks as exported. Functions that no
# other library can replace are called directly, and can be inlined.
HIDDEN = "-fvisibility=hidden"
LINK_TIME = "-flto=auto"
# clang has the first flag and links on one processor with the second, so that is for gcc alone.
GCC_PROBE = """
#if !defined(__GNUC__) || defined(__clang__)
#error "not gcc"
#endif
int probe(void) { return 0; }
"""


def compiler_command() -> list[str]:
    return (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()


def missing_for_compiling() -> str | None:
    """What this machine lacks to compile an extension module, or None."""
    compiler = compiler_command()[0]
    # On Windows the compiler is found by setuptools and stands in no variable.
    if os.name != "nt" and shutil.which(compiler) is None:
        return f"no C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "no Python.h (the python3-dev package)"
    return None


def announce_pure_build(why: str) -> None:
    """One line for the person who installs. pip hides what a build prints, so it goes to the terminal as well."""
    line = f"kvledger: {why}: installing the pure Python build, which decides the same and is several times slower"
    print(line, file=sys.stderr)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        print(f"\n{line}", file=terminal)


def optimizes_when_linking() -> bool:
    """Whether the compiler is a gcc that links with LINK_TIME: found by doing it, since some lack the plugin."""
    with TemporaryDirectory() as directory:
        probe = Path(directory, "probe.c")
        probe.write_text(GCC_PROBE)
        command = [*compiler_command(), LINK_TIME, "-shared", "-fPIC", str(probe), "-o", str(probe.with_suffix(".so"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def extensions() -> list[Extension]:
    if os.environ.get("KVLEDGER_PURE") == "1":
        announce_pure_build("KVLEDGER_PURE=1")
        return []
    missing = missing_for_compiling()
    if missing is not None:
        announce_pure_build(missing)
        return []
    sys.path.insert(0, str(Path(__file__).parent))
    from mypyc.build import mypycify

    from native_docs import complete

    made: list[Extension] = mypycify(
        ["--strict", *COMPILED], opt_level=OPT_LEVEL, group_name="kvledger", multi_file=True
    )
    for source in COMPILED:
        module = ".".join(Path(source).with_suffix("").parts[1:])
        complete(Path("build", f"__native_{module.replace('.', '___')}.c"), Path(source))
    if os.name != "nt":
        flags = [HIDDEN, LINK_TIME] if OPT_LEVEL != "0" and optimizes_when_linking() else [HIDDEN]
        for extension in made:
            extension.extra_compile_args.extend(flags)
            extension.extra_link_args.extend(flags)
    return made


class BuildInParallel(build_ext):
    """Compiles the C files of all extensions at the same time, the longest first; then links as usual."""

    def build_extensions(self) -> None:
        files = [(extension, source) for extension in self.extensions for source in extension.sources]
        files.sort(key=lambda file: -Path(file[1]).stat().st_size)
        # The shortest goes alone: a compiler may set itself up when first called.
        last = files.pop()
        objects = [self.compile_one(*last)]
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            objects += compilers.map(self.compile_one, *zip(*files, strict=True))
        for (extension, source), made in zip([last, *files], objects, strict=True):
            extension.sources.remove(source)
            extension.extra_objects.extend(made)
        super().build_extensions()

    def compile_one(self, extension: Extension, source: str) -> list[str]:
        objects: list[str] = self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            include_dirs=extension.include_dirs,
            debug=self.debug,
            extra_postargs=extension.extra_compile_args,
            depends=extension.depends,
        )
        return objects


if __name__ == "__main__":
    # setup.py is also run for metadata only (egg_info, sdist), where compiling would be wasted. An editable install
    # stays pure: compiled files beside the sources would hide later edits.
    builds = bool({"bdist_wheel", "build_ext", "build"} & set(sys.argv))
    if builds:
        # An earlier build's copies would be packed once more, with modules that are gone by now.
        for copies in Path("build").glob("lib*"):
            shutil.rmtree(copies)
    setup(ext_modules=extensions() if builds else [], cmdclass={"build_ext": BuildInParallel})
