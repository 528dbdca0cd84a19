"""Whole lines of source: taken with their line ends, and moved one step to the right."""

import ast
import re
from collections.abc import Sequence

from auditor.case import Parsed
from auditor.model import Edit, Span
from auditor.source.newer_syntax import DEEPEST, bracket_depth

_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")


def indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def taken(file: Parsed, first: int, last: int) -> list[str]:
    """The lines from `first` to `last`, counted from 1, each with its own line end."""
    return split(file.text)[first - 1 : last]


def newline_of(file: Parsed) -> str:
    """How the file ends its first line."""
    first = split(file.text)[:1]
    return first[0][len(first[0].rstrip("\r\n")) :] or "\n" if first else "\n"


def above(file: Parsed, statement: ast.stmt, lines: Sequence[str]) -> Edit:
    """New lines in front of a statement that begins its line."""
    first, newline = statement.lineno, newline_of(file)
    return Edit(Span(file.path, first, 1, first, 1), "".join(line + newline for line in lines))


def below(file: Parsed, statement: ast.stmt, lines: Sequence[str]) -> Edit:
    """New lines after a statement that ends its line."""
    last, newline = statement.end_lineno or statement.lineno, newline_of(file)
    end = len(file.lines[last - 1]) + 1
    return Edit(Span(file.path, last, end, last, end), newline + newline.join(lines))


def whole(file: Parsed, statement: ast.stmt, *, with_blank_lines: bool = False) -> Edit:
    """The statement's lines deleted; `with_blank_lines`, also those above it that nothing needs any more."""
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    ends_gap = last >= len(file.lines) or not file.lines[last].strip()
    while with_blank_lines and ends_gap and first > 1 and not file.lines[first - 2].strip():
        first -= 1
    while with_blank_lines and first == 1 and last < len(file.lines) and not file.lines[last].strip():
        last += 1
    if last < len(file.lines):
        return Edit(Span(file.path, first, 1, last + 1, 1), "")
    return Edit(Span(file.path, first, 1, last, len(file.lines[last - 1]) + 1), "")


def unit_around(file: Parsed, statement: ast.stmt) -> str:
    """One step of indentation, as the statement around this one has it."""
    outer = indentation(file.lines[getattr(file.parents[statement], "lineno", 1) - 1])
    margin = indentation(file.lines[statement.lineno - 1])
    step = margin[len(outer) :] if margin.startswith(outer) else ""
    return step or ("\t" if margin.startswith("\t") else "    ")


def split(text: str) -> list[str]:
    """Lines with their ends, split where Python splits (str.splitlines also splits at form feeds)."""
    return _LINES.findall(text)


def indented(lines: Sequence[str], unit: str) -> list[str] | None:
    """Whole statements of one block, one `unit` deeper; None where that is not a matter of lines alone.

    What stands within strings stays where it is: libcst knows which lines those are. Where libcst would
    change anything but white space at the beginning of lines, nothing is done.
    """
    bare = [line.rstrip("\r\n") for line in lines]  # each keeps its own end, whatever that is
    base = indentation(next((line for line in bare if _is_code(line)), ""))
    if not base or bracket_depth("".join(lines)) > DEEPEST:
        return None
    import libcst  # a warm audit does without it

    try:
        parsed = libcst.parse_module("if 1:\n" + "\n".join(bare) + "\n")
    except libcst.ParserSyntaxError:
        return None
    outer = parsed.body[0]
    if len(parsed.body) > 1 or not isinstance(outer, libcst.If):
        return None
    inner = outer.with_changes(body=outer.body.with_changes(indent=unit))
    block = libcst.IndentedBlock([inner], indent=base)
    code = parsed.with_changes(body=[outer.with_changes(body=block)]).code
    deeper = [line.removesuffix("\n") for line in split(code)[2:]]
    if not _are_only_indented(bare, deeper, base, unit):
        return None
    return [new + old[len(old.rstrip("\r\n")) :] for old, new in zip(lines, deeper, strict=True)]


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _are_only_indented(lines: Sequence[str], deeper: Sequence[str], base: str, unit: str) -> bool:
    return len(lines) == len(deeper) and all(
        new in (old, base + unit + old[len(base) :] if old.startswith(base) else old)
        for old, new in zip(lines, deeper, strict=True)
    )
