"""Draws docs/images/replay.svg: what `kvledger replay` prints for the bundled sample.

python docs/images/render_replay.py
"""

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from kvledger.cli.replay import replay
from kvledger.cli.replay_options import ReplayOptions
from kvledger.replay.report import print_report

WIDTH = 100


def main() -> None:
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print("[bold green]$[/] kvledger replay\n")
    print_report(replay(ReplayOptions()), console)
    # rich links fonts on another server; without them the picture loads nothing and uses the reader's own.
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="kvledger replay"), flags=re.DOTALL)
    target = Path(__file__).with_name("replay.svg")
    target.write_text(drawing.replace("Fira Code, monospace", "monospace"), encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
