#!/usr/bin/env bash
# Compares with the counts in benchmarks/counts.json: instructions of the main operations (callgrind), and lines of the
# hot modules that mypyc calls slow. Fails when one grew. About two minutes, most of it compiling, once.
#   scripts/check_counts.sh               compare
#   scripts/check_counts.sh --update      write the counts of now
# Needs scripts/make_reference.sh; KVLEDGER_DEV_PYTHON names a Python with the dev extra (default: .venv-pure or .venv).
set -euo pipefail
cd "$(dirname "$0")/.."

dev=${KVLEDGER_DEV_PYTHON:-}
for venv in .venv-pure .venv; do
  if [ -z "$dev" ] && "$venv/bin/python" -c "import mypyc" 2> /dev/null; then dev=$venv/bin/python; fi
done
[ -n "$dev" ] || { echo "check_counts: no Python with mypy; set KVLEDGER_DEV_PYTHON" >&2; exit 1; }

status=0
scripts/reference_python.sh compiled -m benchmarks.instructions "$@" || status=1
"$dev" -m benchmarks.slow_operations "$@" || status=1
exit $status
