"""Files that a command writes: what is there already is not overwritten without a word."""

import os
import stat

from kvledger.errors import wrong_value


def require_free(name: str, path: str, *, overwrite: bool) -> None:
    """ConfigError where the file of that option would take the place of another one, or has no directory. Pipes and
    devices can be written to."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise wrong_value(name, path, f"there is no directory {folder}", "make it, or name another file") from None
        return
    except (OSError, ValueError) as failed:
        raise wrong_value(name, path, f"cannot be written ({failed})", "name another file") from None
    if stat.S_ISDIR(found.st_mode):
        raise wrong_value(name, path, "is a directory", "name a file")
    if stat.S_ISREG(found.st_mode) and found.st_size > 0 and not overwrite:
        raise wrong_value(name, path, "is there already", "name another file, or give --overwrite")
