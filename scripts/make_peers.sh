#!/usr/bin/env bash
# Installs the peers of benchmarks/peers besides vLLM, from the package registry: SGLang's radix cache and Dynamo's
# mocker, each in a venv of its own, on CPU. Half a minute and 400 MB. SGLang borrows torch and transformers from the
# reference, which scripts/make_reference.sh builds first (it is vLLM, the third peer). Does nothing where all is there.
#   scripts/make_peers.sh [DIR]      default: ~/.cache/kvledger/peers
set -euo pipefail
cd "$(dirname "$0")/.."

dir=${1:-${KVLEDGER_CACHE:-$HOME/.cache/kvledger}/peers}
reference=${KVLEDGER_REFERENCE:-$HOME/.cache/kvledger/reference}
# With what importing its cache imports beyond what the reference has.
sglang_packages=("sglang==0.5.23" "orjson==3.13.0" "ipython==9.18.1" "traitlets==5.16.1")
dynamo_packages=("ai-dynamo-runtime==1.6.1")

make_venv() { # NAME PACKAGE...
  local venv=$dir/$1 stamp
  stamp="$* list 1"
  if [ "$(cat "$venv/stamp" 2> /dev/null)" = "$stamp" ]; then return; fi
  echo "make_peers: installing $1 into $venv" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  # --no-deps: SGLang asks for gigabytes of GPU libraries that its cache does not use.
  "$venv/bin/python" -m pip install -q --no-deps "${@:2}"
  if [ "$1" = sglang ]; then
    "$reference/venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
      > "$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/reference.pth"
  fi
  echo "$stamp" > "$venv/stamp"
}

[ -x "$reference/venv/bin/python" ] || scripts/make_reference.sh
mkdir -p "$dir"
make_venv sglang "${sglang_packages[@]}"
make_venv dynamo "${dynamo_packages[@]}"
echo "make_peers: ready: $dir" >&2
