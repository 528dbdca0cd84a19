"""Rows with a title on the left, and lists that stop where nobody reads on."""

from collections.abc import Iterator, Sequence

from reports._paint import STRONG, Row
from reports._text import wrap

TITLE = 12  # cells of the left column
MOST = 12  # names or protocols on show; json has them all


def titled(title: str, lines: list[str], width: int) -> Iterator[Row]:
    for line in lines:
        for part in wrap(line, width - TITLE, hanging=2):
            yield [(f"{title:<{TITLE}}", STRONG), (part, "")]
            title = ""


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
