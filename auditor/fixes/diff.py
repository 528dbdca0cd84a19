"""What a fix changes, as `diff -u` and `git apply` write it."""

import difflib

from auditor.fixes.document import Document
from auditor.fixes.lines import split

NO_NEWLINE = "\\ No newline at end of file\n"


def unified(before: Document, after: Document) -> str:
    """The difference of two states of one file; empty if there is none."""
    lines = difflib.unified_diff(split(before.text), split(after.text), f"a/{before.path}", f"b/{after.path}")
    return "".join(line if line.endswith("\n") else line + _end(line) for line in lines)


def _end(line: str) -> str:
    """The last line of a file may have no end; a bare carriage return ends lines of old files only."""
    return "\n" if line.endswith("\r") else "\n" + NO_NEWLINE
