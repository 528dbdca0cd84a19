"""--history: one line a run, and a curve in the HTML report."""

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.history import HistoryError, appended
from auditor.model import Point
from reports import html
from tests.command_line import UNUSED, poolaudit
from tests.fixtures.reports.sample_runs import EMPTY, TYPICAL

NOON = datetime.datetime(2026, 3, 12, 12, tzinfo=datetime.UTC)


def test_runs_are_added(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    berlin = datetime.timezone(datetime.timedelta(hours=1))
    assert len(appended(file, EMPTY, NOON)) == 1
    first, second = appended(file, TYPICAL, NOON.astimezone(berlin))
    assert first == Point("2026-03-12T12:00:00Z", 3, 40, 0, 0, 0, 0, 0, 0, 0)
    assert second == Point("2026-03-12T12:00:00Z", 14, 1203, 2, 1, 1, 2, 1, 1, 1)
    assert len(file.read_text().splitlines()) == 2


def test_a_missing_last_newline_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    appended(file, EMPTY, NOON)
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    appended(file, EMPTY, NOON)
    assert len(appended(file, EMPTY, NOON)) == 3


@pytest.mark.parametrize("line", ["{", "[]", '{"time": "x"}', "[" * 100_000])
def test_a_line_that_is_no_run_is_named_and_nothing_is_written(tmp_path: Path, line: str) -> None:
    file = tmp_path / "history.jsonl"
    appended(file, EMPTY, NOON)
    before = file.read_text() + line + "\n"
    file.write_text(before)
    with pytest.raises(HistoryError, match=r"history\.jsonl:2: not a run: "):
        appended(file, EMPTY, NOON)
    assert file.read_text() == before


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNUSED)
    arguments = ("audit", "a.py", "--isolated", "--history", "h.jsonl", "--output", "html=r.html")
    poolaudit(*arguments, cwd=tmp_path)
    assert "<figure" not in (tmp_path / "r.html").read_text().partition('id="findings"')[0]
    (tmp_path / "a.py").write_text("x = 1\n")
    poolaudit(*arguments, cwd=tmp_path)
    points = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert [(point["warnings"], point["files"]) for point in points] == [(1, 1), (0, 1)]
    page = (tmp_path / "r.html").read_text()
    assert '<path class="line warning" d="M0.0 0.0L760.0 180.0">' in page
    assert 'class="line error"' not in page  # there never was one


def test_a_history_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    done = poolaudit("audit", "a.py", "--isolated", "--history", "gone/h.jsonl", cwd=tmp_path)
    assert done.status == 2
    assert "gone/h.jsonl: cannot be written: No such file or directory" in done.err


def test_one_run_is_no_curve() -> None:
    once = html.render(replace(TYPICAL, history=TYPICAL.history[:1]), color=False, width=80)
    assert "<figcaption>1 runs" not in once
    assert "3 runs, 2026-01-10 to 2026-03-12" in html.render(TYPICAL, color=False, width=80)
