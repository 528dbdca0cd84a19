"""A place in a file, counted from 1 as editors count."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Half-open range of source text: `end_column` is the column after the last character."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
