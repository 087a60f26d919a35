"""KV events: who holds what, told to routers and indexes outside, in vLLM's format (docs/events.md)."""

from kvledger.events.cache_view import CacheView, ViewedBlock
from kvledger.events.event_builder import EventBuilder, EventStyle
from kvledger.events.event_file import FileSink, read_events
from kvledger.events.event_sink import EventError, EventSink, NullSink
from kvledger.events.event_types import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, decode_batch
from kvledger.events.ledger_events import LedgerEvents
from kvledger.events.salts import SaltNames, SaltRule
from kvledger.events.subscriber import EventSubscriber
from kvledger.events.zmq_sink import ZmqOptions, ZmqSink

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheView",
    "EventBuilder",
    "EventError",
    "EventSink",
    "EventStyle",
    "EventSubscriber",
    "FileSink",
    "KVEventBatch",
    "LedgerEvents",
    "NullSink",
    "SaltNames",
    "SaltRule",
    "ViewedBlock",
    "ZmqOptions",
    "ZmqSink",
    "decode_batch",
    "read_events",
]
