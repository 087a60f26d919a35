#!/usr/bin/env bash
# Feeds our KV events to a public index, the one of NVIDIA Dynamo, and compares it with ours (tests/public_index).
# Installs it once, from the package registry, into ~/.cache/kvledger/public-index. Options go to pytest:
#   scripts/test_public_index.sh
#   scripts/test_public_index.sh --operations 100000      the long run
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${KVLEDGER_PUBLIC_INDEX:-$HOME/.cache/kvledger/public-index}
stamp="ai-dynamo-runtime 1.6.1, list 1"
if [ "$(cat "$dir/stamp" 2> /dev/null)" != "$stamp" ]; then
  echo "installing the public index into $dir" >&2
  rm -rf "$dir"
  python3 -m venv "$dir"
  "$dir/bin/python" -m pip install -q "ai-dynamo-runtime==1.6.1" "pytest>=8.3" "hypothesis>=6.110" "msgspec>=0.19" \
    "pyzmq>=26" "librt>=0.17.0" "mypy_extensions>=1.0"
  echo "$stamp" > "$dir/stamp"
fi
PYTHONPATH=$PWD/src:$PWD exec "$dir/bin/python" -m pytest -q -p no:cacheprovider tests/public_index "$@"
