"""The diff that a report shows of a fix is what the fix does."""

import difflib
from pathlib import Path

import pytest

from auditor.config import Settings
from auditor.engine import Request, audit
from auditor.fixes.document import Document
from auditor.model import Edit, Span
from reports._fix_diff import hunks

LINES = {number: f"line {number}" for number in range(1, 30)}


def edit(line: int, column: int, end_line: int, end_column: int, text: str) -> Edit:
    return Edit(Span("a.py", line, column, end_line, end_column), text)


def shown(*edits: Edit, lines: dict[int, str] = LINES) -> list[tuple[int | str, ...]]:
    return [hunk.rows for hunk in hunks(edits, {"a.py": lines})]


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([edit(5, 1, 5, 1, "new\n")], [(3, 4, "new", 5, 6)]),
        ([edit(5, 1, 6, 1, "")], [(3, 4, -5, 6, 7)]),
        ([edit(5, 6, 5, 7, "five"), edit(5, 1, 5, 5, "Line")], [(3, 4, -5, "Line five", 6, 7)]),
        ([edit(2, 1, 2, 1, "new\r\n")], [(1, "new", 2, 3)]),
        ([edit(5, 1, 5, 5, "a"), edit(8, 1, 8, 5, "b")], [(3, 4, -5, "a 5", 6, 7, -8, "b 8", 9, 10)]),
        ([edit(5, 1, 5, 5, "a"), edit(15, 1, 15, 5, "b")],
         [(3, 4, -5, "a 5", 6, 7), (13, 14, -15, "b 15", 16, 17)]),
        ([edit(30, 1, 30, 1, "at the end\n")], [(28, 29, "at the end")]),
        ([edit(29, 8, 29, 8, "\nat the end")], [(28, 29, "at the end")]),
    ],
)  # fmt: skip
def test_hunks(edits: list[Edit], expected: list[tuple[int | str, ...]]) -> None:
    assert shown(*edits) == expected


def test_half_a_fix_is_not_shown() -> None:
    assert shown(edit(5, 1, 5, 5, "a"), edit(40, 1, 40, 5, "b")) == []


def test_lines_that_are_not_at_hand_divide() -> None:
    there = {number: text for number, text in LINES.items() if number != 6}
    assert shown(edit(5, 1, 5, 5, "a"), edit(7, 1, 7, 5, "b"), lines=there) == [
        (3, 4, -5, "a 5", 7),
        (5, -7, "b 7", 8, 9),
    ]


def test_every_fix_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added and removed lines are those of the edited file, compared as a whole."""
    examples = Path(__file__).parent.parent / "examples"
    monkeypatch.chdir(examples)
    run = audit(Request(("longdoc",), Settings(), examples)).run
    offered = [finding.fix for finding in run.findings if finding.fix and finding.fix.edits]
    assert len(offered) >= 10
    for fix in offered:
        by_path: dict[str, list[Edit]] = {}
        for each in fix.edits:
            by_path.setdefault(each.span.path, []).append(each)
        for path, edits in by_path.items():
            before = Document(path, (examples / path).read_bytes())
            old, new = (text.text.split("\n") for text in (before, before.edited(tuple(edits))))
            expected = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
            rows = [row for hunk in hunks(edits, run.excerpts) for row in hunk.rows]
            added = [f"+ {row}" for row in rows if isinstance(row, str)]
            removed = [f"- {old[-row - 1]}" for row in rows if isinstance(row, int) and row < 0]
            assert sorted(added + removed) == sorted(expected)
            kept = [row for row in rows if isinstance(row, int) and row > 0]
            assert all(run.excerpts[path][row] == old[row - 1] for row in kept)
