"""The known trace formats, and opening a trace in the right one."""

import os
from importlib.resources import files
from typing import Final

from kvledger.errors import KVLedgerError, wrong_value
from kvledger.traces.agent_sessions import AgentSessionReader
from kvledger.traces.azure import AzureReader
from kvledger.traces.bailian import BailianReader
from kvledger.traces.burstgpt import BurstGptReader
from kvledger.traces.conversations import OpenAiBatchReader, ShareGptReader, WildChatReader
from kvledger.traces.dynamo import DynamoReader
from kvledger.traces.fields import FieldsReader, parse_fields
from kvledger.traces.first_record import FirstRecord
from kvledger.traces.kv_events import KvEventReader
from kvledger.traces.lines import TraceLines
from kvledger.traces.litellm import LiteLlmReader
from kvledger.traces.mooncake import MooncakeReader, TimedTraceReader
from kvledger.traces.reader import TraceReader
from kvledger.traces.recording import RecordingReader
from kvledger.traces.recordings import MergedRecordings
from kvledger.traces.session_rows import AiperfReader, MooncakeSessionReader
from kvledger.traces.tokenizer import Tokenizer
from kvledger.traces.trace_request import TraceError
from kvledger.traces.untimed import UntimedReader

FORMATS: Final[dict[str, type[TraceReader]]] = {
    reader.name: reader
    for reader in (
        MooncakeReader,
        TimedTraceReader,
        MooncakeSessionReader,
        AiperfReader,
        AgentSessionReader,
        AzureReader,
        BailianReader,
        BurstGptReader,
        DynamoReader,
        LiteLlmReader,
        UntimedReader,
        ShareGptReader,
        WildChatReader,
        OpenAiBatchReader,
        KvEventReader,
        RecordingReader,
    )
}


def sample_path() -> str:
    """The bundled trace: the first 1,500 requests of the Mooncake conversation trace."""
    return str(files("kvledger.traces") / "data" / "mooncake_sample.jsonl.gz")


def open_trace(
    path: str,
    format_name: str | None = None,
    trace_block_size: int | None = None,
    skip_bad: bool = False,
    *,
    fields: str | None = None,
    tokenizer: str | None = None,
) -> TraceReader:
    """A reader over the file. The format is recognised from the first record unless it is named, or `fields` says what
    the rows' fields are called (see fields.py); where it can be one of several, TraceError asks for its name. A
    directory is read as recordings that belong together.

    `trace_block_size`: tokens that one hash id stands for, where the format itself does not say. `tokenizer`: of a
    format with texts, a tokenizer.json.
    """
    if fields is not None and format_name is not None:
        raise wrong_value("fields", fields, f"format {format_name} is given too", "give one of the two")
    if os.path.isdir(path):
        told = (trace_block_size, fields, tokenizer, None if format_name == RecordingReader.name else format_name)
        if told != (None, None, None, None):
            problem = "a directory holds recordings, which say their format themselves"
            raise wrong_value("trace", path, problem, "leave out how it is read, or give one file")
        return MergedRecordings(path, skip_bad)
    lines = TraceLines(path, skip_bad)
    try:
        if fields is not None:
            return FieldsReader(lines, trace_block_size, parse_fields(fields))
        reader_class = _recognise(lines, trace_block_size) if format_name is None else _named(format_name)
        if trace_block_size is not None and not reader_class.takes_block_size:
            problem = f"a trace of the {reader_class.name} format says so itself"
            raise wrong_value("trace_block_size", trace_block_size, problem, "leave it out")
        reader = reader_class(lines, trace_block_size)
        _give_tokenizer(reader, tokenizer)
        return reader
    except KVLedgerError:
        lines.close()
        raise


def _give_tokenizer(reader: TraceReader, tokenizer: str | None) -> None:
    if tokenizer is None:
        if reader.tokenizer_use == "must":
            problem = f"a {reader.name} trace is text, and how many tokens it has is the tokenizer's to say"
            raise wrong_value("tokenizer", None, problem, "give the model's tokenizer.json")
    elif reader.tokenizer_use == "none":
        raise wrong_value("tokenizer", tokenizer, f"a {reader.name} trace has no texts", "leave it out")
    else:
        reader.tokenizer = Tokenizer(tokenizer)


def _named(format_name: str) -> type[TraceReader]:
    reader_class = FORMATS.get(format_name)
    if reader_class is None:
        raise wrong_value("format", format_name, "not a trace format", "use one of " + ", ".join(FORMATS))
    return reader_class


def _recognise(lines: TraceLines, trace_block_size: int | None) -> type[TraceReader]:
    first = FirstRecord(lines.peek())
    found = [reader_class for reader_class in FORMATS.values() if reader_class.recognises(first)]
    if trace_block_size is not None and MooncakeReader in found:
        # How many tokens an id has is said for that format alone; another one is named.
        return MooncakeReader
    if len(found) == 1:
        return found[0]
    if found:
        marks = "; ".join(f"{reader_class.name}: {reader_class.mark}" for reader_class in found)
        raise TraceError(
            f"{lines.path}, line 1: more than one format looks like this ({marks}); name the right one with --format"
        )
    known = "; ".join(f"{name}: {reader_class.mark}" for name, reader_class in FORMATS.items())
    raise TraceError(
        f"{lines.path}, line 1: not a trace of a known format ({known}); name the format with --format if line 1 is "
        "bad, or say what the fields are called with --fields"
    )
