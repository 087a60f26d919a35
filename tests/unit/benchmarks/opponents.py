"""Contestants that do nothing and say how long it took."""

from typing import Any


class Scripted:
    """Answers each burst with the next of the given values; leaves out the cases that it is told to."""

    def __init__(self, name: str, values: list[float], leaves_out: tuple[str, ...] = ()) -> None:
        self.name = name
        self.version = f"{name} 1.0"
        self.log: list[str] = []
        self._values = list(values)
        self._leaves_out = leaves_out

    def open(self, case: dict[str, Any]) -> str | None:
        if case["size"] in self._leaves_out:
            return "no such thing"
        self.log.append("open")
        return None

    def burst(self, num_counted: int) -> list[float]:
        self.log.append(f"burst of {num_counted}")
        taken, self._values = self._values[:num_counted], self._values[num_counted:]
        return taken

    def close(self) -> None:
        self.log.append("close")
