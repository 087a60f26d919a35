"""Whole files: configs, plans, layouts, logs, prompts. A path, or - for standard input; pipes are read to their end."""

import sys
from typing import Final

from kvledger.errors import wrong_value

# The largest of them, the weight index of a large checkpoint, has about 20 MB.
MAX_FILE_BYTES: Final = 64 << 20


def read_whole(option: str, path: str) -> bytes:
    """ConfigError for what cannot be read or is longer than MAX_FILE_BYTES."""
    try:
        if path == "-":
            content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with open(path, "rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as failed:
        problem = f"cannot be read ({getattr(failed, 'strerror', None) or failed})"
        raise wrong_value(option, path, problem, "give the path of a file") from None
    if len(content) > MAX_FILE_BYTES:
        raise wrong_value(option, path, f"longer than {MAX_FILE_BYTES >> 20} MiB", "give a smaller file")
    return content


def read_text(option: str, path: str) -> str:
    """The same as text in UTF-8, with or without a byte order mark. ConfigError for what is none."""
    try:
        return read_whole(option, path).decode("utf-8-sig")
    except UnicodeDecodeError as failed:
        problem = f"not UTF-8 text (byte {failed.start}: {failed.reason})"
        raise wrong_value(option, path, problem, "give a text file in UTF-8") from None
