"""Comments that silence: where they count, what they silence, and what they cannot."""

from auditor.model import Finding, Severity, Span
from auditor.source.suppress import Suppression, silence, suppressions


def lines_and_codes(text: str) -> list[tuple[int, tuple[str, ...]]]:
    return [(comment.line, comment.codes) for comment in suppressions("x.py", text)]


def finding(line: int, code: str, path: str = "x.py") -> Finding:
    return Finding(code, "name", Severity.ERROR, Span(path, line, 1, line, 2), "f", "message")


def test_on_the_line_and_alone_above_it() -> None:
    text = (
        "a = 1  # poolaudit: ignore[PA101]\n# poolaudit: ignore[PA102]\nb = 2\n    # poolaudit: ignore[PA3]\n"
    )
    assert lines_and_codes(text) == [(1, ("PA101",)), (3, ("PA102",)), (5, ("PA3",))]


def test_forms() -> None:
    assert lines_and_codes("x  # poolaudit:ignore[PA101,PA2 , PA301]") == [(1, ("PA101", "PA2", "PA301"))]
    assert lines_and_codes("x  # noqa: F821  # poolaudit: ignore [PA101] because") == [(1, ("PA101",))]
    assert lines_and_codes("x  # poolaudit: ignore") == [(1, ())]
    assert lines_and_codes("x  # poolaudit: ignore[]") == [(1, ("",))]
    assert lines_and_codes("x  # poolaudit: ignored") == []
    assert lines_and_codes("x  # poolaudit: ignore-this") == []


def test_strings_are_no_comments() -> None:
    text = 's = "# poolaudit: ignore[PA101]"\nt = """\n# poolaudit: ignore[PA101]\n"""\n'
    assert lines_and_codes(text) == []


def test_span_is_that_of_the_comment() -> None:
    [comment] = suppressions("x.py", "abc  #  poolaudit: ignore[PA101] x\n")
    assert comment.span == Span("x.py", 1, 9, 1, 33)


def test_line_ends_and_form_feeds() -> None:
    assert lines_and_codes(
        "a\r\nb  # poolaudit: ignore[PA1]\r\nc\rd # poolaudit: ignore[PA2]\r\x0ce # poolaudit: ignore[PA3]"
    ) == [
        (2, ("PA1",)),
        (4, ("PA2",)),
        (5, ("PA3",)),
    ]


def test_silencing_records_what_was_used() -> None:
    text = "a = 1  # poolaudit: ignore[PA101, PA2]\nb = 2  # poolaudit: ignore\n"
    comments = suppressions("x.py", text)
    findings = [finding(1, "PA101"), finding(1, "PA102"), finding(2, "PA301"), finding(1, "PA101", "y.py")]
    kept, used = silence(findings, comments)
    assert kept == [findings[1], findings[3]]
    assert [comment.used for comment in used] == [("PA101",), ("PA301",)]


def test_empty_brackets_silence_nothing() -> None:
    comment = Suppression(Span("x.py", 1, 1, 1, 2), 1, ("",))
    assert not comment.silences("PA101")
