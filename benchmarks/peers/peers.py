"""The peers: where their interpreters are, and what work each of them leaves out of which question."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.peers.case import Case
from kvledger import build_info
from kvledger.errors import wrong_value

# Name of a peer -> its venv under the cache directory, as the scripts in scripts/ make them.
PEERS: Final = {"vllm": "reference/venv", "sglang": "peers/sglang", "dynamo": "peers/dynamo"}
_CACHE: Final = "~/.cache/kvledger"

_SGLANG_HASH: Final = "SGLang compares token ids in a tree instead of hashing"
_SGLANG_DECODE: Final = "SGLang gets ready tensors and caches nothing at decode; requests are not looked at"
_LEFT_OUT: Final[dict[tuple[str, str], str]] = {
    ("vllm", "decode_step"): "vLLM has no door for several requests: one call each, whatever ours does. It hashes what "
    "becomes full at the append; ours hashes within the call",
    ("vllm", "block_table"): "vLLM's slots are a GPU kernel; here the same sum in numpy, with positions given",
    ("sglang", "decode_step"): _SGLANG_DECODE,
    ("sglang", "admission"): _SGLANG_HASH,
    ("sglang", "free"): _SGLANG_HASH,
    ("sglang", "pool_size"): _SGLANG_HASH,
    ("sglang", "cached_blocks"): _SGLANG_HASH,
    ("sglang", "pool_build"): "SGLang's pool is a tensor of free page numbers",
    (
        "dynamo",
        "scheduler_step",
    ): "Dynamo's mocker counts tokens and numbers blocks: no token ids, no hashes, no output "
    "for workers. It is the difference of two runs, a shorter and a longer one",
    ("dynamo", "replay"): "Dynamo's mocker numbers blocks, as ours does here, and has a step-time model of its own",
}


def left_out(peer: str, case: Case) -> str:
    """Of the work that ours does in this case, what this peer does not; empty when it does it all."""
    if peer == "vllm" and case.question == "block_table" and case.variant != "slots":
        return ""
    if peer == "vllm" and case.question == "decode_step" and case.variant == "append":
        return ""
    return _LEFT_OUT.get((peer, case.question), "")


def find_interpreters(given: Mapping[str, str], only: tuple[str, ...]) -> dict[str, str]:
    """Interpreters of the peers asked for (all that are there, if `only` is empty), by name.

    In this order: `given`, the variable KVLEDGER_PEER_<NAME>, the place where the scripts put it. ConfigError for a
    peer that is asked for and not there.
    """
    for name in (*given, *only):
        if name not in PEERS:
            raise wrong_value("peer", name, "unknown peer", "use one of " + ", ".join(PEERS))
    found: dict[str, str] = {}
    for name in PEERS:
        if only and name not in only:
            continue
        usual = _usual_place(name) / "bin" / "python"
        python = given.get(name) or os.environ.get(f"KVLEDGER_PEER_{name.upper()}")
        if python is not None:
            found[name] = python
        elif usual.exists():
            found[name] = str(usual)
        elif name in only:
            raise wrong_value(
                "peer",
                name,
                f"no interpreter at {usual}",
                f"make it with scripts/make_peers.sh, or give --peer-python {name}=PATH",
            )
    return found


def _usual_place(name: str) -> Path:
    """The venv of a peer, where the scripts put it: the same variables move it."""
    reference = os.environ.get("KVLEDGER_REFERENCE")
    if name == "vllm" and reference is not None:
        return Path(reference) / "venv"
    return Path(os.environ.get("KVLEDGER_CACHE", _CACHE)).expanduser() / PEERS[name]


def machine(decides_as: str) -> list[str]:
    """Where it is measured, and what of ours: the build, and the release of vLLM whose decisions it makes."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.processor() or platform.machine()
    system = f"{platform.system()} {platform.release()}"
    python = f"Python {platform.python_version()}"
    return [f"{cpu}, {os.cpu_count()} CPUs", system, python, f"{build_info()} deciding as vLLM {decides_as}"]
