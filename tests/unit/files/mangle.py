"""Files that are almost right: a good document with a few values replaced, or its bytes cut, repeated, overwritten."""

import json
from typing import Any

from hypothesis import strategies as st

# What breaks readers: every type of JSON, edges of numbers, lists of the wrong things.
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 0.5, -0.5, 10**6, 2**31, 2**63, 10**18, 10**30, 1e18, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "x", "0", "-1", "1e999", "auto", "bfloat16", "fp8", "full", "\ud800",
    [], {}, [0], [-1], [None], [1, "a"], [[1]], [10**12] * 3, {"a": 1}, {"0": {"x": 1}}, {"type": "x"}, [{}],
]  # fmt: skip
PIECES = [b"\xff", b"\0", b"\n", b'"', b"\\", b"}", b"]", b",", b"9" * 5000, b"\xef\xbb\xbf", b"-"]
DEEP = [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 2000 + b"]" * 2000]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of all values; of long lists the first ones."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:4]):
            found += _paths(inner, (*path, index))
    return found


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three values replaced, left out or added."""
    result = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        paths = _paths(result)
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        place = result
        for step in path[:-1]:
            place = place[step]
        action = draw(st.sampled_from(["replace"] * 6 + ["remove", "add"]))
        value = json.loads(json.dumps(draw(st.sampled_from(VALUES))))
        if action == "remove":
            del place[path[-1]]
        elif action == "add" and isinstance(place, dict):
            place[draw(st.sampled_from(["x", "type", "groups", "requests", "hash_ids"]))] = value
        else:
            place[path[-1]] = value
    return result


@st.composite
def broken_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes cut, with others among them, or something else altogether."""
    how = draw(st.sampled_from(["cut", "insert", "overwrite", "repeat", "deep", "noise"]))
    at = draw(st.integers(0, len(content)))
    if how == "cut":
        return content[:at]
    if how == "noise":
        return draw(st.binary(max_size=200))
    if how == "deep":
        return content[:at] + draw(st.sampled_from(DEEP)) + content[at:]
    if how == "repeat":
        return content[:at] * 3
    piece = draw(st.sampled_from(PIECES))
    return content[:at] + piece + content[at + (len(piece) if how == "overwrite" else 0) :]


def mangled(document: Any) -> st.SearchStrategy[bytes]:
    """A JSON document that is almost right."""
    text = json.dumps(document).encode()
    return st.one_of(changed(document).map(lambda value: json.dumps(value).encode()), broken_bytes(text))


@st.composite
def mangled_lines(draw: st.DrawFn, lines: list[str]) -> bytes:
    """Lines, some of which are JSON, and one of which is broken; or the whole file is."""
    content = [line.encode() for line in lines]
    which = draw(st.integers(0, len(content) - 1))
    try:
        document = json.loads(lines[which])
    except ValueError:
        document = None
    content[which] = draw(broken_bytes(content[which]) if document is None else mangled(document))
    whole = b"\n".join(content) + b"\n"
    return draw(broken_bytes(whole)) if draw(st.integers(0, 3)) == 0 else whole
