"""Baselines: known findings by fingerprint, as a multiset."""

from collections import Counter
from pathlib import Path

import pytest

from auditor.baseline import BaselineError, read_baseline, unknown, write_baseline
from auditor.model import Finding, Severity, Span
from tests.command_line import UNUSED, places, poolaudit


def finding(line: int, fingerprint: str) -> Finding:
    return Finding(
        "PA101", "n", Severity.ERROR, Span("a.py", line, 1, line, 2), "f", "m", fingerprint=fingerprint
    )


def test_round_trip_and_multiset(tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    write_baseline(file, [finding(1, "x"), finding(2, "x"), finding(3, "y")])
    known = read_baseline(file)
    assert known == Counter({"x": 2, "y": 1})
    now = [finding(11, "x"), finding(12, "x"), finding(13, "x"), finding(14, "z"), finding(15, "y")]
    assert [f.span.line for f in unknown(now, known)] == [13, 14]
    assert known == Counter({"x": 2, "y": 1})


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1}', '{"version": 2, "findings": []}', "[" * 100_000]
)
def test_not_a_baseline(tmp_path: Path, text: str) -> None:
    file = tmp_path / "known.json"
    file.write_text(text)
    with pytest.raises(BaselineError, match=r"known\.json: "):
        read_baseline(file)


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    written = poolaudit("audit", "--write-baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert (written.status, places(written.json)) == (0, [])
    (tmp_path / "a.py").write_text("\n\n" + UNUSED)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    known = poolaudit("audit", "--baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert (known.status, places(known.json)) == (0, [])
    assert known.json["summary"]["findings"] == {}
    (tmp_path / "b.py").write_text(UNUSED + "y = 2  # poolaudit: ignore[PA301]\n")
    new = poolaudit("audit", "--baseline", "known.json", "--format", "json", cwd=tmp_path)
    assert (new.status, places(new.json)) == (1, [("b.py", 2, "PA002")])


def test_from_the_settings_relative_to_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text(UNUSED)
    poolaudit("audit", "--write-baseline", "../known.json", cwd=tmp_path / "sub")
    (tmp_path / "poolaudit.toml").write_text("baseline = 'known.json'\n")
    assert poolaudit("audit", cwd=tmp_path / "sub").status == 0
    assert poolaudit("audit", "--isolated", cwd=tmp_path / "sub").status == 1


def test_missing_baseline(tmp_path: Path) -> None:
    done = poolaudit("audit", "--baseline", "gone.json", cwd=tmp_path)
    assert done.status == 2
    assert "gone.json: cannot be read: No such file or directory" in done.err
