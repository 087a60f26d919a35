"""Small plots out of block characters, for a terminal. rich has none."""

from rich.style import Style
from rich.text import Text

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def resample(values: list[float], width: int) -> list[float]:
    """Exactly `width` values: the largest of each stretch, so that no peak is lost, or values repeated."""
    count = len(values)
    if count == 0:
        return [0.0] * width
    columns: list[float] = []
    for column in range(width):
        start = column * count // width
        end = max(start + 1, (column + 1) * count // width)
        columns.append(max(values[start:end]))
    return columns


def bars(values: list[float], top: float, height: int) -> list[str]:
    """One column a value, from 0 at the bottom to `top`, as lines from the top down. What is not 0 shows."""
    levels = [_level(value, top, height) for value in values]
    return ["".join(_cell(level, row) for level in levels) for row in reversed(range(height))]


def stacked_bars(lower: list[float], upper: list[float], height: int, colours: tuple[str, str]) -> list[Text]:
    """Shares of 1.0, the upper series on top of the lower one. Where they meet in a cell, one is the background."""
    lower_colour, upper_colour = colours
    lower_levels = [_level(value, 1.0, height) for value in lower]
    upper_levels = [_level(a + b, 1.0, height) for a, b in zip(lower, upper, strict=True)]
    lines: list[Text] = []
    for row in reversed(range(height)):
        line = Text()
        for low, high in zip(lower_levels, upper_levels, strict=True):
            if low <= row * 8:
                line.append(_cell(high, row), Style(color=upper_colour))
            else:
                background = upper_colour if high >= (row + 1) * 8 > low else None
                line.append(_cell(low, row), Style(color=lower_colour, bgcolor=background))
        lines.append(line)
    return lines


def _level(value: float, top: float, height: int) -> int:
    """Height of a bar in eighths of a cell."""
    if value <= 0 or top <= 0:
        return 0
    return max(1, round(min(value / top, 1.0) * height * 8))


def _cell(level: int, row: int) -> str:
    return _EIGHTHS[max(0, min(8, level - row * 8))]
