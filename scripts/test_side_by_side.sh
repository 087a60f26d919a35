#!/usr/bin/env bash
# Runs tests/side_by_side in the reference's Python, against real vLLM. Options after the mode go to pytest:
#   scripts/test_side_by_side.sh compiled
#   scripts/test_side_by_side.sh pure --calls 20000 -k manager
#   scripts/test_side_by_side.sh compiled --calls 20000000 --first-seed 1000     the long run
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-compiled}
shift || true
expect=0
[ "$mode" = compiled ] && expect=1
run() {
  # Warnings are vLLM's own; what it logs while a test runs is no help when ours differs.
  KVLEDGER_EXPECT_COMPILED=$expect scripts/reference_python.sh "$mode" -m pytest -q -p no:cacheprovider \
    -W ignore::DeprecationWarning -W ignore::UserWarning --show-capture=no -n auto "$@"
}
# First that the right build is the one compared, whatever is deselected below.
run tests/unit/test_build.py -k build
run tests/side_by_side "$@"
