#!/usr/bin/env bash
# Runs the reference's Python with this checkout's kvledger in it, from the root of the repository.
#   scripts/reference_python.sh compiled -m benchmarks.bench_events
#   scripts/reference_python.sh pure -m pytest tests/side_by_side
# "compiled" builds and installs into build/reference first, unless that is up to date; "pure" runs src as it is.
# KVLEDGER_VLLM_RELEASE=0.33 takes that release's files instead of 0.32 (scripts/make_reference.sh 0.33 lays them).
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-}
python=${KVLEDGER_REFERENCE:-$HOME/.cache/kvledger/reference}/venv/bin/python
if [ "$mode" != compiled ] && [ "$mode" != pure ]; then
  sed -n '2,6p' "$0" >&2
  exit 2
fi
shift
[ -x "$python" ] || { echo "no reference: run scripts/make_reference.sh first" >&2; exit 1; }
release=${KVLEDGER_VLLM_RELEASE:-0.32}
vllm=
if [ "$release" != 0.32 ]; then
  vllm=${python%/venv/bin/python}/releases/$release
  [ -d "$vllm" ] || { echo "no files of vLLM $release: run scripts/make_reference.sh $release first" >&2; exit 1; }
fi

if [ "$mode" = pure ]; then
  place=$PWD/src
else
  place=$PWD/build/reference
  # What the build depends on; the interpreter decides which compiled files can be loaded.
  sources=$(find src/kvledger pyproject.toml setup.py native_docs.py -type f -not -name "*.pyc" -print0 | sort -z | xargs -0 sha256sum)
  stamp=$(printf '%s %s %s\n' "$sources" "$python" "${KVLEDGER_OPT_LEVEL:-3}" | sha256sum)
  if [ "$(cat "$place/stamp" 2> /dev/null)" != "$stamp" ]; then
    echo "compiling kvledger for the reference" >&2
    rm -rf "$place"
    "$python" -m pip install -q --no-deps --target "$place" . 2> /dev/null ||
      "$python" -m pip install --no-deps --target "$place" . >&2
    ls "$place"/kvledger__mypyc*.so > /dev/null || { echo "the build is not compiled: is there a C compiler?" >&2; exit 1; }
    echo "$stamp" > "$place/stamp"
  fi
fi
# OMP: torch's thread pool only disturbs; the rest keeps vLLM from looking for devices and the network.
export PYTHONPATH=$place:$PWD${vllm:+:$vllm} OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
exec "$python" "$@"
