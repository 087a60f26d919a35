"""Dynamo's standalone indexer as a process: it subscribes like to any vLLM, and answers over HTTP."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.request import Request, urlopen

DEADLINE_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_done():
        assert time.monotonic() < deadline, f"not after {DEADLINE_S} s: {what}"
        time.sleep(0.02)


class Indexer:
    """A context manager. One worker, number 1."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.port = free_port()
        arguments = ["--block-size", str(block_size), "--port", str(self.port), "--threads", "1"]
        code = f"from dynamo.llm import run_kv_indexer; run_kv_indexer({arguments!r})"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)

    def __enter__(self) -> "Indexer":
        wait_for("the indexer answers", self._answers)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()

    def subscribe(self, endpoint: str, replay_endpoint: str) -> None:
        worker = {"instance_id": 1, "model_name": "m", "block_size": self.block_size}
        self._call("/register", {**worker, "endpoint": endpoint, "replay_endpoint": replay_endpoint})

    def hashes(self) -> set[int]:
        """Everything that it holds for cached."""
        events = self._call("/dump")["m:default"]["events"]
        stored = [event["event"]["data"]["stored"] for event in events]
        return {block["block_hash"] for blocks in stored for block in blocks["blocks"]}

    def num_cached_tokens(self, token_ids: list[int], **identity: str) -> int:
        answer = self._call("/query", {"token_ids": token_ids, "model_name": "m", **identity})
        return int(answer["scores"].get("1", {"0": 0})["0"])

    def _answers(self) -> bool:
        try:
            self._call("/workers")
        except OSError:
            return False
        return True

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"http://127.0.0.1:{self.port}{path}", data, headers), timeout=30) as answer:
            return json.load(answer)
