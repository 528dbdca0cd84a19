"""One verdict an acquire, names that survive edits, and the lines a report shows."""

import itertools
from dataclasses import replace

import pytest

from auditor.arbitrate import ORDER, arbitrate
from auditor.excerpts import excerpts, text_at
from auditor.fingerprint import canonical, fingerprinted
from auditor.model import Finding, Severity, Span, Step


def finding(
    code: str, line: int, path: str = "a.py", symbol: str = "f", columns: tuple[int, int] = (5, 17)
) -> Finding:
    start, end = columns
    return Finding(code, "name", Severity.ERROR, Span(path, line, start, line, end), symbol, "message")


def test_the_first_in_the_order_is_kept() -> None:
    assert sorted(ORDER) == [str(number) for number in range(101, 112)]
    for first, second in itertools.combinations(ORDER, 2):
        here = [finding(f"PA{second}", 3), finding(f"PA{first}", 3)]
        assert [f.code for f in arbitrate(here)] == [f"PA{first}"]


def test_other_places_and_other_rules_stay() -> None:
    found = [
        finding("PA301", 3),
        finding("PA103", 3),
        finding("PA201", 3),
        finding("PA103", 4),
        finding("PA101", 3),
    ]
    assert [(f.span.line, f.code) for f in arbitrate(found)] == [
        (3, "PA101"),
        (3, "PA201"),
        (3, "PA301"),
        (4, "PA103"),
    ]
    assert len(arbitrate([finding("PA201", 3), finding("PA201", 3)])) == 1


BEFORE = ["def f(pool):", "    b = pool.get(8)", "    c = pool.get(8)"]
AFTER = ["", "# moved", "def f(pool):", "        b  =  pool.get(8)", "", "        c  =  pool.get(8)"]


def prints(found: list[Finding], lines: list[str]) -> list[str]:
    return [f.fingerprint for f in fingerprinted(found, lambda path: lines)]


def test_fingerprints_survive_moved_lines_and_renamed_files() -> None:
    before = prints([finding("PA101", 2, columns=(9, 20)), finding("PA101", 3, columns=(9, 20))], BEFORE)
    after = prints(
        [finding("PA101", 4, "b.py", columns=(15, 26)), finding("PA101", 6, "b.py", columns=(15, 26))], AFTER
    )
    assert before == after
    assert len(set(before)) == 2


def test_fingerprints_tell_apart() -> None:
    base = finding("PA101", 2)
    others = [base, replace(base, code="PA102"), replace(base, symbol="g"), finding("PA101", 3)]
    assert len({prints([other], BEFORE)[0] for other in others}) == 4


def test_twins_in_two_files_have_one_fingerprint() -> None:
    both = prints([finding("PA101", 2), finding("PA101", 2, "b.py")], BEFORE)
    assert both[0] == both[1]


def test_text_of_a_span() -> None:
    lines = ["x = pool.get(", "    8,", ")  # tail"]
    assert text_at(Span("a.py", 1, 5, 3, 2), lines) == "pool.get(\n    8,\n)"
    assert text_at(Span("a.py", 9, 1, 9, 2), lines) == ""


def test_excerpts_cover_finding_and_trace_with_context() -> None:
    found = replace(finding("PA101", 2), trace=(Step("a.py", 9, 1, "left"), Step("b.py", 1, 1, "called")))
    texts = {"a.py": [f"a{n}" for n in range(1, 11)], "b.py": ["b1", "b2"]}
    cut = excerpts([found], texts.__getitem__)
    assert list(cut) == ["a.py", "b.py"]
    assert cut["a.py"] == {n: f"a{n}" for n in (1, 2, 3, 4, 7, 8, 9, 10)}
    assert cut["b.py"] == {1: "b1", 2: "b2"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("pool.get(8, 'a')", 'pool.get(\n    8,  # eight\n    "a",\n)'),
        ("pool.get((x))", "pool.get(x)"),
        ("class A(B, C):", "class A(\n    B,\n    C,\n):"),
        ("from a import b, c", "from a import (\n    b,\n    c,\n)"),
        ("await pool.get(0xFF)", "await pool.get( 255 )"),
        ("not ) python (", "not )   python ("),
    ],
)
def test_formatting_does_not_matter(one: str, other: str) -> None:
    assert canonical(one) == canonical(other)


def test_content_matters() -> None:
    texts = ["pool.get(8)", "pool.get(9)", "pool.get('a  b')", "pool.get('a b')", "pool.get(8, a=1)"]
    assert len({canonical(text) for text in texts}) == len(texts)
