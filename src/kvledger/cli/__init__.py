"""The `kvledger` command: one file per subcommand, each imported only when it is asked for.

Data goes to stdout, messages to stderr. Exit codes: 0 done, 1 the work failed (a broken input, a plan that does not
fit), 2 the command line is wrong.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

from kvledger import build_info

# Subcommand -> the module whose `register(app)` adds it.
COMMANDS = {
    "curve": "kvledger.cli.curve",
    "generate": "kvledger.cli.generate",
    "plan": "kvledger.cli.plan",
    "replay": "kvledger.cli.replay",
    "top": "kvledger.cli.top",
    "trace": "kvledger.cli.trace",
}


def main(argv: list[str]) -> int:
    """Runs one command line (without the program's name) and returns its exit code."""
    if argv == ["--version"]:
        # Needs no extra: it is how to see which build was installed.
        print(build_info())
        return 0
    if find_spec("typer") is None:
        print("kvledger: the command needs the cli extra: pip install 'kvledger[cli]'", file=sys.stderr)
        return 1
    from kvledger.cli.app import run

    asked = [COMMANDS[argv[0]]] if argv and argv[0] in COMMANDS else list(COMMANDS.values())
    return run(argv, [import_module(name) for name in asked])


def entry_point() -> None:
    sys.exit(main(sys.argv[1:]))
