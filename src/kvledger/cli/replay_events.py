"""`kvledger replay --events`: the replayed ledger's KV events into a file, or to whoever subscribes."""

import sys
from time import sleep

from kvledger.core.groups.spec import KVCacheConfig
from kvledger.errors import ConfigError, wrong_value
from kvledger.events import EventSink, FileSink, LedgerEvents, ZmqOptions, ZmqSink
from kvledger.events.endpoints import LAST_PORT

_POLL_S = 0.02
# A recording misses nothing, so the end waits for the last event.
CLOSE_S = 600.0


def open_events(target: str, hash_name: str, config: KVCacheConfig) -> LedgerEvents:
    """Events into a file, or, for an address with ://, to sockets: then it waits until somebody subscribes.

    ConfigError for a file or an address that cannot be used, and for blocks that have names only.
    """
    if hash_name == "none":
        raise wrong_value("hash", hash_name, "events carry the tokens of blocks, and these have none", "use sha256")
    if "://" not in target:
        return _published(FileSink(target), config)
    if target.endswith(":0"):
        raise wrong_value("events", target, "a port that the system chooses is known to nobody", "name a port")
    port = target.rpartition(":")[2]
    if target.startswith("tcp://") and port.isdigit() and int(port) > LAST_PORT - 2:
        problem = f"events take three ports, this one and the two behind it, and the last port is {LAST_PORT}"
        raise wrong_value("events", target, problem, f"name a port up to {LAST_PORT - 2}")
    replay, snapshot = (_neighbour(target, number) for number in (1, 2))
    try:
        # Replayed tokens are made up, so everybody may ask for them.
        sink = ZmqSink(ZmqOptions(target, replay, snapshot, snapshot_key=b""))
    except ConfigError as error:
        raise ConfigError(f"events={target!r}: {error}") from error
    events = _published(sink, config)
    print(f"kvledger: waiting for a subscriber at {target} (replay {replay}, snapshots {snapshot})", file=sys.stderr)
    while not sink.has_subscriber:
        sleep(_POLL_S)
    return events


def _published(sink: EventSink, config: KVCacheConfig) -> LedgerEvents:
    return LedgerEvents(config, sink, waits_when_full=True)


def _neighbour(endpoint: str, number: int) -> str:
    """tcp: that many ports on; else the address with a number behind it."""
    head, colon, port = endpoint.rpartition(":")
    return f"{head}{colon}{int(port) + number}" if port.isdigit() else f"{endpoint}-{number}"
