"""The known trace formats, and opening a trace in the right one."""

from importlib.resources import files
from typing import Final

from kvledger.errors import KVLedgerError, wrong_value
from kvledger.traces.agent_sessions import AgentSessionReader
from kvledger.traces.azure import AzureReader
from kvledger.traces.lines import TraceLines
from kvledger.traces.mooncake import MooncakeReader
from kvledger.traces.reader import TraceReader
from kvledger.traces.trace_request import TraceError

FORMATS: Final[dict[str, type[TraceReader]]] = {
    reader.name: reader for reader in (MooncakeReader, AgentSessionReader, AzureReader)
}


def sample_path() -> str:
    """The bundled trace: the first 1,500 requests of the Mooncake conversation trace."""
    return str(files("kvledger.traces") / "data" / "mooncake_sample.jsonl.gz")


def open_trace(
    path: str, format_name: str | None = None, trace_block_size: int | None = None, skip_bad: bool = False
) -> TraceReader:
    """A reader over the file. The format is recognised from the first record unless it is named.

    `trace_block_size`: tokens that one hash id stands for, where the format itself does not say.
    """
    lines = TraceLines(path, skip_bad)
    try:
        return _make_reader(lines, format_name, trace_block_size)
    except KVLedgerError:
        lines.close()
        raise


def _make_reader(lines: TraceLines, format_name: str | None, trace_block_size: int | None) -> TraceReader:
    reader_class = _recognise(lines) if format_name is None else _named(format_name)
    if trace_block_size is not None and reader_class is not MooncakeReader:
        raise wrong_value(
            "trace_block_size",
            trace_block_size,
            f"a trace of the {reader_class.name} format says so itself",
            "leave it out",
        )
    return reader_class(lines, trace_block_size)


def _named(format_name: str) -> type[TraceReader]:
    reader_class = FORMATS.get(format_name)
    if reader_class is None:
        raise wrong_value("format", format_name, "not a trace format", "use one of " + ", ".join(FORMATS))
    return reader_class


def _recognise(lines: TraceLines) -> type[TraceReader]:
    first = lines.peek()
    for reader_class in FORMATS.values():
        if reader_class.recognises(first):
            return reader_class
    known = "; ".join(f"{name}: {reader_class.mark}" for name, reader_class in FORMATS.items())
    raise TraceError(f"{lines.path}, line 1: not a trace of a known format ({known}); name the format if line 1 is bad")
