"""Small traces, written by hand, and the words in which the tests speak of them."""

import gzip
import json
import lzma
from pathlib import Path

from kvledger.traces.formats import open_trace
from kvledger.traces.reader import TraceReader
from kvledger.traces.trace_request import TraceRequest

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def mooncake(timestamp: float = 0, prompt: int = 600, output: int = 5, ids: list[int] | None = None) -> str:
    """One line of a Mooncake trace; by default a prompt of one whole block and a partial one."""
    record = {
        "timestamp": timestamp,
        "input_length": prompt,
        "output_length": output,
        "hash_ids": [0, 1] if ids is None else ids,
    }
    return json.dumps(record)


def agent_request(t: float, prompt: int, ids: list[int], output: int = 5, **more: object) -> dict[str, object]:
    """One request of an agent session, in blocks of 64 tokens."""
    return {"t": t, "type": "n", "in": prompt, "out": output, "hash_ids": ids, **more}


def session(*requests: dict[str, object], scope: str = "local") -> str:
    """One line of an agent trace."""
    return json.dumps({"id": "s", "block_size": 64, "hash_id_scope": scope, "requests": list(requests)})


def write(directory: Path, *lines: str, name: str = "trace.jsonl") -> str:
    """A trace file of these lines, compressed as its name says."""
    path = directory / name
    content = "".join(line + "\n" for line in lines).encode()
    if name.endswith(".gz"):
        content = gzip.compress(content)
    elif name.endswith(".xz"):
        content = lzma.compress(content)
    path.write_bytes(content)
    return str(path)


def read(path: str, *, skip_bad: bool = False, format_name: str | None = None) -> list[TraceRequest]:
    """All requests of a trace, of every session in turn."""
    reader = open_trace(path, format_name, skip_bad=skip_bad)
    try:
        return all_requests(reader)
    finally:
        reader.lines.close()


def all_requests(reader: TraceReader) -> list[TraceRequest]:
    if reader.has_clock:
        return list(reader.requests())
    return [request for one in reader.sessions() for request in one.requests]
