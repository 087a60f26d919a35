#!/usr/bin/env bash
# Runs tests/plugin in the reference's Python: the adapter against vLLM's manager, and real engines with and without it.
#   scripts/test_plugin.sh compiled
#   scripts/test_plugin.sh pure tests/plugin/test_manager.py
# "compiled" builds first. Options and files after the mode go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-compiled}
shift || true
[ $# -gt 0 ] || set -- tests/plugin
# Warnings are vLLM's and its libraries' own.
exec scripts/reference_python.sh "$mode" -m pytest -q -p no:cacheprovider --show-capture=no -n auto \
  -W ignore::DeprecationWarning -W ignore::UserWarning -W ignore::FutureWarning "$@"
