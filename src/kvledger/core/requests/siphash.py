"""SipHash-2-4 with 128 bits of output: a keyed hash for names that only this engine reads.

Whoever does not know the key cannot craft two inputs with one name, as he could with an unkeyed fast hash; whoever
knows it can. J.-P. Aumasson, D. J. Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT 2012; the 128-bit variant is
their reference implementation's.

The rounds stand here twice: compiled, a native integer wraps at 64 bits by itself; uncompiled, it must be masked.
"""

from typing import Final

from librt.strings import BytesWriter, read_i64_le, write_i64_le
from mypy_extensions import i64

from kvledger.errors import wrong_value

KEY_BYTES: Final = 16
_IS_COMPILED: Final = not __file__.endswith(".py")
_WORD_BYTES: Final = 8
# "somepseudorandomlygeneratedbytes", the paper's initial state.
_START: Final = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


class SipHash:
    """SipHash-2-4-128 under one key. `key`: 16 bytes, secret."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            problem = f"SipHash takes a key of {KEY_BYTES} bytes, not {len(key)}"
            raise wrong_value("key", "...", problem, f"give {KEY_BYTES} secret random bytes: secrets.token_bytes(16)")
        self._key: Final = key
        self._key_low: Final[i64] = read_i64_le(key, 0)
        self._key_high: Final[i64] = read_i64_le(key, _WORD_BYTES)

    def digest(self, data: bytes) -> bytes:
        """16 bytes."""
        return self._native_digest(data) if _IS_COMPILED else self.masked_digest(data)

    def _native_digest(self, data: bytes) -> bytes:
        v0: i64 = self._key_low ^ 0x736F6D6570736575
        v1: i64 = self._key_high ^ 0x646F72616E646F6D ^ 0xEE
        v2: i64 = self._key_low ^ 0x6C7967656E657261
        v3: i64 = self._key_high ^ 0x7465646279746573
        num_bytes: i64 = len(data)
        whole_end: i64 = num_bytes - (num_bytes & 7)
        last: i64 = num_bytes << 56
        index: i64 = whole_end
        while index < num_bytes:
            last |= i64(data[index]) << ((index - whole_end) * 8)
            index += 1
        writer = BytesWriter()
        # The words of the data, the last one with the length in it, then two finishing passes, each of which gives a
        # half of the result.
        index = 0
        while index <= whole_end + 16:
            word: i64 = 0
            num_rounds: i64 = 2
            if index < whole_end:
                word = read_i64_le(data, index)
            elif index == whole_end:
                word = last
            else:
                num_rounds = 4
                if index == whole_end + 8:
                    v2 ^= 0xEE
                else:
                    v1 ^= 0xDD
            v3 ^= word
            while num_rounds > 0:
                v0 += v1
                v2 += v3
                v1 = ((v1 << 13) | ((v1 >> 51) & 0x1FFF)) ^ v0
                v3 = ((v3 << 16) | ((v3 >> 48) & 0xFFFF)) ^ v2
                v0 = (v0 << 32) | ((v0 >> 32) & 0xFFFFFFFF)
                v2 += v1
                v0 += v3
                v1 = ((v1 << 17) | ((v1 >> 47) & 0x1FFFF)) ^ v2
                v3 = ((v3 << 21) | ((v3 >> 43) & 0x1FFFFF)) ^ v0
                v2 = (v2 << 32) | ((v2 >> 32) & 0xFFFFFFFF)
                num_rounds -= 1
            v0 ^= word
            if index > whole_end:
                write_i64_le(writer, v0 ^ v1 ^ v2 ^ v3)
            index += 8
        return writer.getvalue()

    def masked_digest(self, data: bytes) -> bytes:
        """digest() in Python's own integers: what the native one is compared with."""
        low = int.from_bytes(self._key[:_WORD_BYTES], "little")
        high = int.from_bytes(self._key[_WORD_BYTES:], "little")
        state = [_START[0] ^ low, _START[1] ^ high ^ 0xEE, _START[2] ^ low, _START[3] ^ high]
        padded = data + bytes(-(len(data) + 1) % _WORD_BYTES) + bytes([len(data) & 0xFF])
        for start in range(0, len(padded), _WORD_BYTES):
            word = int.from_bytes(padded[start : start + _WORD_BYTES], "little")
            state[3] ^= word
            _mix(state, 2)
            state[0] ^= word
        halves = b""
        for place, mark in ((2, 0xEE), (1, 0xDD)):
            state[place] ^= mark
            _mix(state, 4)
            halves += (state[0] ^ state[1] ^ state[2] ^ state[3]).to_bytes(_WORD_BYTES, "little")
        return halves


def _mix(state: list[int], num_rounds: int) -> None:
    """SipRounds over the four words of the state."""
    mask = (1 << 64) - 1
    v0, v1, v2, v3 = state
    for _ in range(num_rounds):
        v0 = (v0 + v1) & mask
        v2 = (v2 + v3) & mask
        v1 = ((v1 << 13 | v1 >> 51) & mask) ^ v0
        v3 = ((v3 << 16 | v3 >> 48) & mask) ^ v2
        v0 = (v0 << 32 | v0 >> 32) & mask
        v2 = (v2 + v1) & mask
        v0 = (v0 + v3) & mask
        v1 = ((v1 << 17 | v1 >> 47) & mask) ^ v2
        v3 = ((v3 << 21 | v3 >> 43) & mask) ^ v0
        v2 = (v2 << 32 | v2 >> 32) & mask
    state[:] = [v0, v1, v2, v3]
