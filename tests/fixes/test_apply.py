"""Edits into texts: all of a fix or nothing, nothing beside its edits, no file that does not parse."""

import pytest

from auditor.fixes.apply import Applied, Fate, apply
from auditor.fixes.document import BadEdit, Document
from auditor.model import Edit, FixOffer, Safety, Span


def edit(path: str, line: int, column: int, end_line: int, end_column: int, text: str) -> Edit:
    return Edit(Span(path, line, column, end_line, end_column), text)


def offer(*edits: Edit) -> FixOffer:
    return FixOffer(Safety.SAFE, "because", edits)


def applied(source: dict[str, str | bytes], *offers: FixOffer) -> Applied:
    documents = {
        path: Document(path, text if isinstance(text, bytes) else text.encode())
        for path, text in source.items()
    }
    return apply(offers, documents)


def fates(result: Applied) -> list[Fate]:
    return [outcome.fate for outcome in result.outcomes]


def test_several_edits_of_several_fixes_go_in_at_once() -> None:
    result = applied(
        {"a.py": "a = 1\nb = 2\nc = 3\n", "b.py": "d = 4\n"},
        offer(edit("a.py", 1, 5, 1, 6, "10"), edit("b.py", 1, 1, 1, 2, "e")),
        offer(edit("a.py", 3, 1, 3, 1, "# kept\n")),
    )
    assert fates(result) == [Fate.APPLIED, Fate.APPLIED]
    texts = {path: document.text for path, document in result.documents.items()}
    assert texts == {"a.py": "a = 10\nb = 2\n# kept\nc = 3\n", "b.py": "e = 4\n"}


def test_a_fix_whose_edits_meet_an_earlier_ones_waits_whole() -> None:
    result = applied(
        {"a.py": "a = 1\nb = 2\n", "b.py": "d = 4\n"},
        offer(edit("a.py", 1, 1, 1, 6, "z = 1")),
        offer(edit("b.py", 1, 1, 1, 2, "e"), edit("a.py", 1, 6, 1, 6, "0")),
    )
    assert fates(result) == [Fate.APPLIED, Fate.LATER]
    assert result.outcomes[1].reason == "another fix changes a.py:1 too"
    assert list(result.documents) == ["a.py"]


def test_what_two_fixes_ask_for_alike_goes_in_once() -> None:
    new_import = edit("a.py", 1, 1, 1, 1, "import x\n")
    result = applied(
        {"a.py": "a = 1\nb = 2\nc = 3\n"},
        offer(new_import, edit("a.py", 2, 5, 2, 6, "x.b")),
        offer(new_import, edit("a.py", 3, 5, 3, 6, "x.c")),
    )
    assert fates(result) == [Fate.APPLIED, Fate.APPLIED]
    assert result.documents["a.py"].text == "import x\na = 1\nb = x.b\nc = x.c\n"


def test_only_the_fix_that_breaks_a_file_is_refused() -> None:
    result = applied(
        {"a.py": "def f():\n    return 1\n\n\nb = 2\n"},
        offer(edit("a.py", 5, 5, 5, 6, "3")),
        offer(edit("a.py", 2, 1, 2, 13, "return 1")),
        offer(edit("a.py", 1, 5, 1, 6, "g")),
    )
    assert fates(result) == [Fate.APPLIED, Fate.REFUSED, Fate.APPLIED]
    assert result.outcomes[1].reason == "a.py would not be valid Python any more"
    assert result.documents["a.py"].text == "def g():\n    return 1\n\n\nb = 3\n"


def test_a_refused_fix_blocks_nobody() -> None:
    result = applied(
        {"a.py": "a = 1\n"}, offer(edit("a.py", 1, 5, 1, 6, "(")), offer(edit("a.py", 1, 5, 1, 6, "2"))
    )
    assert fates(result) == [Fate.REFUSED, Fate.APPLIED]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (offer(), "it is advice, without edits"),
        (offer(edit("a.py", 9, 1, 9, 1, "")), "a.py has no line 9, column 1"),
        (offer(edit("a.py", 1, 9, 1, 9, "")), "a.py: line 1 has no column 9"),
        (offer(edit("c.py", 1, 1, 1, 1, "")), "c.py is no longer what was analysed"),
        (
            offer(edit("a.py", 1, 1, 1, 3, "x"), edit("a.py", 1, 2, 1, 4, "y")),
            "a.py: two of its edits overlap",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(bad: FixOffer, reason: str) -> None:
    result = applied({"a.py": "a = 1\n"}, bad)
    assert [(o.fate, o.reason) for o in result.outcomes] == [(Fate.REFUSED, reason)]
    assert not result.documents


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a = 1\r\nb = 2\r\n", b"a = 1\r\nnew = 0\r\nb = 2\r\n"),
        (b"a = 1\rb = 2\r", b"a = 1\rnew = 0\rb = 2\r"),
        (b"\xef\xbb\xbfa = 1\nb = 2", b"\xef\xbb\xbfa = 1\nnew = 0\nb = 2"),
        (b"# \xe9 coding: latin-1\nb = '\xe9'\n", b"# \xe9 coding: latin-1\nnew = 0\nb = '\xe9'\n"),
        (b"\x0ca = 1\nb = '''\r'''\n", b"\x0ca = 1\nnew = 0\nb = '''\r'''\n"),
    ],
)
def test_newlines_marks_and_encodings_stay(before: bytes, after: bytes) -> None:
    result = applied({"a.py": before}, offer(edit("a.py", 2, 1, 2, 1, "new = 0\n")))
    assert result.documents["a.py"].data == after


def test_what_the_encoding_cannot_write_is_refused() -> None:
    result = applied({"a.py": b"# coding: latin-1\na = 1\n"}, offer(edit("a.py", 2, 5, 2, 6, "'\u20ac'")))
    assert result.outcomes[0].reason == "a.py: latin-1 cannot write '\u20ac'"


def test_columns_count_characters() -> None:
    document = Document("a.py", "é = '\U0001f600'; b = 2\n".encode())
    assert document.edited([edit("a.py", 1, 10, 1, 11, "c")]).text == "é = '\U0001f600'; c = 2\n"


def test_an_edit_before_its_own_beginning_is_no_edit() -> None:
    with pytest.raises(BadEdit, match="ends before it begins"):
        Document("a.py", b"a = 1\n").edited([edit("a.py", 1, 3, 1, 2, "")])
