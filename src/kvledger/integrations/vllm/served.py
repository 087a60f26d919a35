"""Which vLLM and which configurations the ledger serves. The rest is left to vLLM's own manager, with the reason.

The ledger decides as the vLLM that it is in does.
"""

import re
from typing import Final

from kvledger.core.groups.decisions import RELEASES
from kvledger.errors import KVLedgerError

# (major, minor) of vLLM.
OLDEST: Final = (0, 32)
NEWEST: Final = (0, 33)


class NotServedError(Exception):
    """The ledger does not serve this; the message says what. vLLM's own manager does."""


def parsed_version(version: str) -> tuple[int, int]:
    """(major, minor) of "0.32.1.dev3+cpu"; (0, 0) of what is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def nearest_release(version: str) -> str:
    """The release with known decisions to start from: the newest that is not newer, or the oldest."""
    known = [release for release in RELEASES if parsed_version(release) <= parsed_version(version)]
    return known[-1] if known else RELEASES[0]


def require_version(version: str, force: bool = False) -> None:
    """NotServedError unless that vLLM is known, or the user insists."""
    if not force and not OLDEST <= parsed_version(version) <= NEWEST:
        raise NotServedError(
            f"vLLM {version}: known are {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}; to try all the same, set "
            "KVLEDGER_VLLM=force"
        )


def as_not_served(error: KVLedgerError) -> NotServedError:
    """A configuration that the ledger itself refuses."""
    return NotServedError(f"this configuration ({error})")
