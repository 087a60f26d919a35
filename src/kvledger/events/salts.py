"""What events tell of cache salts: as they are, under a name that tells nothing, or not at all.

A salt separates tenants. Whoever knows another tenant's salt can probe what that tenant has in the cache, so events
that leave the operator's hands should not carry it.
"""

import hashlib
import os
from enum import Enum
from typing import Final

from kvledger.errors import wrong_value

_NAME_BYTES: Final = 16
_MAX_KEY_BYTES: Final = 64


class SaltRule(Enum):
    PLAIN = "plain"
    HASHED = "hashed"
    OMITTED = "omitted"


class SaltNames:
    """What stands for each salt in events; None: nothing does.

    Hashed names are blake2b under a key, 32 hexadecimal digits. Publishers of one key give the same names, so that a
    router can join them; without a key it is drawn, and names hold for this publisher alone.
    """

    def __init__(self, rule: SaltRule = SaltRule.PLAIN, key: bytes | None = None) -> None:
        if key is not None and not 0 < len(key) <= _MAX_KEY_BYTES:
            problem = f"{len(key)} bytes are no key"
            raise wrong_value("salt_key", "(secret)", problem, f"give 1 to {_MAX_KEY_BYTES} bytes, or none to draw one")
        if key is not None and rule is not SaltRule.HASHED:
            raise wrong_value("salt_key", "(secret)", f"nothing is hashed with salts {rule.value}", "leave it out")
        self._rule: Final = rule
        self._key: Final = os.urandom(32) if key is None else key

    def name(self, salt: str) -> str | None:
        if self._rule is SaltRule.PLAIN:
            return salt
        if self._rule is SaltRule.OMITTED:
            return None
        return hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=_NAME_BYTES, key=self._key).hexdigest()
