"""What the plugin would serve of a release, kind by kind, and whether it then decides as the release's own manager.

    scripts/reference_python.sh pure -m tests.plugin.search --seeds 2

Prints JSON lines for kvledger.integrations.vllm.drift: a layout by name, and what keeps it from being served: "" for
nothing, the reason of the adapter, or the first difference.
"""

import argparse
import json
import logging
import sys

from kvledger.integrations.vllm.served import NotServedError
from tests.plugin.manager_pair import ManagerPair
from tests.side_by_side.layouts import MODEL_LAYOUTS, Layout
from tests.side_by_side.search import describe_failure

NUM_CALLS = 300


def problem(layout: Layout, num_seeds: int) -> str:
    """The first that is found."""
    for seed in range(num_seeds):
        num_calls = 0
        try:
            pair = ManagerPair(layout, seed)
            try:
                pair.run(NUM_CALLS)
            finally:
                num_calls = pair.num_calls
        except NotServedError as reason:
            return f"left to vLLM: {reason}"
        except Exception as difference:
            return f"seed {seed}, call {num_calls}: {describe_failure(difference)}"
    return ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.plugin.search")
    parser.add_argument("--seeds", type=int, default=2, help="seeds a layout")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    for layout in MODEL_LAYOUTS:
        print(json.dumps({"layout": layout.name, "problem": problem(layout, options.seeds)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
