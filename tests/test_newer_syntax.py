"""Files that only a newer Python parses are analysed all the same."""

from auditor.config import AnalysisSettings
from auditor.project.analysis import analyse
from auditor.source.newer_syntax import in_older_syntax

LEAKING = """\
type Shape = tuple[int, ...]


class Stage[T]:
    def run[S](self, pool, names: dict[str, T]) -> T:
        buf = pool.acquire(8)
        print(f"{names["first"]} and {", ".join(names)}")
        if not names:
            return None
        pool.release(buf)
        return names
"""


def test_lines_stay_where_they_are() -> None:
    older = in_older_syntax(LEAKING)
    assert older is not None
    assert [n for n, line in enumerate(older.splitlines(), 1) if "pool.acquire" in line] == [6]


def test_a_leak_in_newer_syntax_is_found() -> None:
    flow = analyse({"stage.py": LEAKING}, AnalysisSettings(exceptions="none"))
    assert flow.failures == ()
    assert [(lease.span.line, lease.symbol) for lease in flow.leases if lease.leaks] == [(6, "Stage.run")]


def test_what_no_python_parses_stays_a_failure() -> None:
    assert in_older_syntax("def f(:\n    pass\n") is None
    assert in_older_syntax("x = " + "(" * 5000 + ")" * 5000) is None
