"""Rows of styled pieces, joined with terminal colours or without."""

from collections.abc import Iterable

from auditor.model import Severity

Piece = tuple[str, str]  # text, rich style; "" for none
Row = list[Piece]

SEVERITY_STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold cyan"}
STRONG, QUIET, FRAME = "bold", "dim", "blue"


def paint(rows: Iterable[Row], *, color: bool) -> str:
    """Every row as one line; no trailing blanks, and a line break after each."""
    lines = (_line(row) if color else "".join(text for text, _ in row).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _line(row: Row) -> str:
    """One row with its escapes; rich is only loaded here, where somebody asked for colour."""
    from rich.color import ColorSystem
    from rich.style import Style

    return "".join(
        Style.parse(style).render(text, color_system=ColorSystem.STANDARD) if style else text
        for text, style in row
    ).rstrip()
