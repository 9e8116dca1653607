"""Heat maps as data: cells with a shade, a text and a title, which page.html.jinja draws as SVG."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

SHADES = 6
"""How many steps a scale has: the classes q0 to q5 of the page's style."""
LEAST_SPAN = 0.05
"""The least that a scale spans, as a part of its highest number."""
FAULT, TOLD, UNKNOWN = "fault", "told", "unknown"
"""Classes of cells that are outside a scale: something does not arrive; told by other ranks; cannot be known."""
WIDE, NARROW = 62, 9
"""Pixels of a cell with text, and the least of one without."""
MOST_WITH_TEXT = 16
"""Columns of a map whose cells have room for text."""
WIDTH = 1060
"""Pixels that a map should take at most."""
HEIGHT = 16
"""Pixels of a row."""
CHARACTER = 6.6
"""Pixels of a character of the labels."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One field of a map."""

    shade: str
    """Its class in the page's style."""
    title: str
    """What is shown under the pointer."""
    text: str = ""
    """What is written into it, if the map has room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Shades for numbers between two ends, in equal steps."""

    low: float
    high: float
    name: Callable[[float], str]
    """Formats a number with its unit."""

    @classmethod
    def of(cls, numbers: Iterable[float], name: Callable[[float], str]) -> "Scale":
        """Return the scale of these numbers. Numbers that are close together get shades that are close together."""
        found = list(numbers)
        low, high = min(found), max(found)
        return cls(low=low if low == high else min(low, high * (1 - LEAST_SPAN)), high=high, name=name)

    def shade(self, number: float) -> str:
        if self.high == self.low:
            return f"q{SHADES // 2}"
        return f"q{min(SHADES - 1, max(0, int((number - self.low) / (self.high - self.low) * SHADES)))}"

    def legend(self) -> list[tuple[str, str]]:
        """Return each shade, and what it means."""
        if self.high == self.low:
            return [(self.shade(self.low), self.name(self.low))]
        step = (self.high - self.low) / SHADES
        ends = [self.low + step * at for at in range(SHADES + 1)]
        return [(f"q{at}", f"{self.name(ends[at])} to {self.name(ends[at + 1])}") for at in range(SHADES)]


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A table of cells with labels, axes and a legend."""

    title: str
    row_axis: str
    column_axis: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[Cell | None]]
    """[row][column]; None where there is nothing."""
    legend: Sequence[tuple[str, str]]
    """Shade -> what it means."""
    marks: Mapping[int, str]
    """Row -> what is written behind it."""
    note: str = ""

    @property
    def cell_width(self) -> float:
        if len(self.columns) <= MOST_WITH_TEXT:
            return WIDE
        return max(NARROW, min(24, (WIDTH - self.left) / len(self.columns)))

    @property
    def cell_height(self) -> int:
        return HEIGHT

    @property
    def has_text(self) -> bool:
        return len(self.columns) <= MOST_WITH_TEXT

    @property
    def left(self) -> float:
        """Where the cells begin, to the right of the rows' labels."""
        return max(map(len, (self.row_axis, *self.rows))) * CHARACTER + 10

    @property
    def top(self) -> float:
        return 2.0 * HEIGHT

    @property
    def width(self) -> float:
        marks = max(map(len, self.marks.values()), default=0)
        axis = self.left + len(self.column_axis) * CHARACTER
        return max(self.left + len(self.columns) * self.cell_width + marks * CHARACTER + 12, axis)

    @property
    def height(self) -> float:
        return self.top + len(self.rows) * HEIGHT + 4

    def placed(self) -> Iterator[tuple[float, float, Cell]]:
        """Yield each cell with the place of its upper left corner."""
        for row, cells in enumerate(self.cells):
            for column, cell in enumerate(cells):
                if cell:
                    yield round(self.left + column * self.cell_width, 1), self.top + row * HEIGHT, cell

    def column_labels(self) -> Iterator[tuple[float, str]]:
        """Yield the labels of the columns with their middles, as many as there is room for."""
        longest = max(map(len, self.columns), default=1)
        every = max(1, -(-int((longest + 1) * CHARACTER) // int(self.cell_width)))
        for column in range(0, len(self.columns), every):
            yield round(self.left + (column + 0.5) * self.cell_width, 1), self.columns[column]

    def row_labels(self) -> Iterator[tuple[float, str, str]]:
        """Yield (y of its base line, label, note at its right end) for each row."""
        for row, label in enumerate(self.rows):
            yield self.top + row * HEIGHT + 12, label, self.marks.get(row, "")


def alike(rows: Sequence[Sequence[Cell | None]]) -> list[list[int]]:
    """Return the numbers of rows in groups whose shades and texts are the same."""
    groups: dict[tuple[tuple[str, str] | None, ...], list[int]] = {}
    for number, cells in enumerate(rows):
        groups.setdefault(tuple((cell.shade, cell.text) if cell else None for cell in cells), []).append(number)
    return list(groups.values())


def in_bins(count: int, most: int) -> list[range]:
    """Return numbers below count in at most so many runs of equal length."""
    size = -(-count // most)
    return [range(start, min(count, start + size)) for start in range(0, count, size)]


def label_of(numbers: range) -> str:
    """Return a run of numbers as text."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def summed(matrix: Sequence[Sequence[int]], rows: Sequence[range], columns: Sequence[range]) -> list[list[int]]:
    """Return the matrix at a coarser grid: the sum over each block, which is some of the rows and some of the
    columns.
    """
    return [[sum(matrix[row][column] for row in some for column in others) for others in columns] for some in rows]
