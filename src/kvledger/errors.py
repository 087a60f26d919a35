"""Every exception of the library, in one tree.

KVLedgerError (ValueError)
    ConfigError            a configuration value is wrong: names the field, the value and the fix
    RequestError           a request, or what is asked for it, is wrong
        UnknownRequestError    no request of that id is held (never admitted, or freed already)
        RequestTooLargeError   the request needs more blocks than the whole pool has
    BlockError             a block is used against its state: freed twice, freed while free, unknown id
    OutOfBlocksError       more blocks were asked for than are free
InvariantError (Exception) check() found a broken invariant: a bug in this library, or a change that was interrupted
UnfinishedChangeError (Exception) a call comes within another's change, or after one that was interrupted
StallError (Exception)     requests wait, and for many steps none made progress; says why each of them waits

"It does not fit right now" is no error: allocate_slots returns None for that.
"""


class KVLedgerError(ValueError):
    """Base of every error that a caller can cause. The ledger is unchanged when one is raised."""


class ConfigError(KVLedgerError):
    """A configuration value is wrong."""


class RequestError(KVLedgerError):
    """A request, or what is asked for it, is wrong."""


class UnknownRequestError(RequestError):
    """No request of that id is held."""


class RequestTooLargeError(RequestError):
    """The request needs more blocks than the whole pool has, so waiting cannot help."""


class BlockError(KVLedgerError):
    """A block is used against its state."""


class OutOfBlocksError(KVLedgerError):
    """More blocks were asked for than are free."""


class InvariantError(Exception):
    """check() found a broken invariant, or a change that was interrupted."""


class UnfinishedChangeError(Exception):
    """A change is under way, or never ended: an observer calls back, or MemoryError or an interrupt came in between."""


class StallError(Exception):
    """Work exists, and for many steps nothing of it was done."""


def wrong_value(field: str, value: object, problem: str, fix: str) -> ConfigError:
    """A ConfigError in the library's one form: field, value, what is wrong, what to do."""
    return ConfigError(f"{field}={value!r}: {problem}; {fix}")


def require(condition: bool, invariant: str) -> None:
    """Raises InvariantError unless the invariant holds. For check() methods only: the text is built on every call."""
    if not condition:
        raise InvariantError(invariant)
