"""The scorer on a made-up run: what counts, what matches, what it says when a package is missing."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.field import score as scorer
from tests.field.score import (
    NotMeasured,
    Report,
    Score,
    Site,
    check_package,
    compare,
    read_labels,
    reports_of,
)

LEAK = Site("pkg", "1.0", "pkg/a.py", 3, 11, "pool.allocate", "blocks", "leak", False, "lost on the return")
OTHER_LEAK = dataclasses.replace(LEAK, line=9, reason="lost on the continue")
CLEAN = dataclasses.replace(LEAK, line=20, verdict="clean", reason="freed at 22")
RAISING = dataclasses.replace(CLEAN, line=30, exception_only=True)
SITES = (LEAK, OTHER_LEAK, CLEAN, RAISING)


def report(line: int, code: str = "PA101", column: int = 11, file: str = "pkg/a.py") -> Report:
    return Report("pkg", file, line, column, code)


def run_of(*found: tuple[str, int, str]) -> dict[str, Any]:
    findings = [{"path": path, "line": line, "column": 5, "code": code} for path, line, code in found]
    return {"version": 1, "findings": findings}


def test_finds_misses_and_alarms_are_told_apart() -> None:
    score = compare(SITES, [report(3, "PA102"), report(20, "PA101"), report(77)])
    assert score.found == (LEAK,)
    assert score.missed == (OTHER_LEAK,)
    assert score.alarms == ((CLEAN, "PA101"),)
    assert score.silent == (RAISING,)
    assert (score.unlabelled, score.codes) == (1, {"PA101": 2, "PA102": 1})
    assert (score.recall, score.false_rate) == (0.5, 0.5)


def test_sites_a_report_led_to_are_counted_apart() -> None:
    chosen = dataclasses.replace(CLEAN, line=40, after_run=True)
    score = compare((*SITES, chosen), [report(20), report(40)])
    assert score.false_rate == 2 / 3
    assert score.blind == (1, 2)
    assert "judged before a run 1/2" in scorer.as_text(score)


@pytest.mark.parametrize("code", ["PA103", "PA111", "PA001", "PA201", "PA301", "PA501"])
def test_other_rules_neither_find_nor_alarm(code: str) -> None:
    score = compare(SITES, [report(3, code), report(20, code), report(77, code)])
    assert (score.found, score.alarms, score.unlabelled, score.codes) == ((), (), 0, {})


def test_leaks_told_by_the_rules_of_raising_paths_are_counted_apart() -> None:
    lost = dataclasses.replace(OTHER_LEAK, exception_only=True)
    score = compare((LEAK, lost), [report(3), report(9, "PA103"), report(3, "PA103")])
    assert (score.found, score.missed, score.raising) == ((LEAK,), (lost,), (lost,))
    assert "but for exceptions  1/1; of the missed 1 are told by PA103" in scorer.as_text(score)


def test_the_same_line_of_another_file_does_not_match() -> None:
    score = compare(SITES, [report(3, file="pkg/b.py"), Report("other", "pkg/a.py", 9, 11, "PA101")])
    assert (score.found, score.unlabelled) == ((), 2)


def test_two_reports_of_one_site_count_once() -> None:
    score = compare(SITES, [report(3, "PA102"), report(3, "PA109")])
    assert (score.found, score.unlabelled) == ((LEAK,), 0)


def test_two_sites_on_a_line_are_told_apart_by_column() -> None:
    inner = dataclasses.replace(CLEAN, line=3, column=40)
    score = compare((LEAK, inner), [report(3, column=39)])
    assert (score.found, score.alarms) == ((), ((inner, "PA101"),))


@pytest.mark.parametrize(
    ("leaks", "found", "clean", "alarms", "good"),
    [(10, 9, 20, 1, True), (10, 8, 20, 0, False), (10, 10, 20, 2, False), (0, 0, 0, 0, True)],
)
def test_the_goals(leaks: int, found: int, clean: int, alarms: int, good: bool) -> None:
    score = Score(
        (LEAK,) * found, (LEAK,) * (leaks - found), (CLEAN,) * (clean - alarms), ((CLEAN, "PA101"),) * alarms
    )
    assert score.good is good


def test_reports_are_read_from_json() -> None:
    assert list(reports_of("pkg", run_of(("pkg/a.py", 3, "PA104")))) == [
        Report("pkg", "pkg/a.py", 3, 5, "PA104")
    ]


def test_text_names_every_miss_and_alarm_with_its_reason() -> None:
    text = scorer.as_text(compare(SITES, [report(3), report(20, "PA107")]), verbose=True)
    assert "true leaks found      1/2 = 50.0% (goal 90%)" in text
    assert "clean sites reported  1/2 = 50.0% (goal 5%)" in text
    assert "MISSED: pkg/a.py:9 pool.allocate [blocks]\n    lost on the continue" in text
    assert "FALSE PA107: pkg/a.py:20 pool.allocate [blocks]\n    freed at 22" in text
    assert "found: pkg/a.py:3 pool.allocate [blocks]\n    lost on the return" in text


def unpack(root: Path) -> Path:
    folder = root / "pkg"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "a.py").write_text("")
    (folder / "pkg-1.0.dist-info").mkdir()
    return folder


def test_an_unpacked_package_is_found(tmp_path: Path) -> None:
    folder = unpack(tmp_path)
    assert check_package(tmp_path, SITES) == folder


@pytest.mark.parametrize("gone", ["pkg", "pkg/pkg-1.0.dist-info", "pkg/pkg/a.py"])
def test_a_missing_package_says_how_to_get_it(tmp_path: Path, gone: str) -> None:
    unpack(tmp_path)
    (tmp_path / gone).rename(tmp_path / "elsewhere")
    with pytest.raises(NotMeasured, match=r"does not exist(.|\n)*pip download .* pkg==1\.0"):
        check_package(tmp_path, SITES)


def write_labels(folder: Path) -> Path:
    file = folder / "labels.json"
    file.write_text(json.dumps({"version": 1, "sites": [dataclasses.asdict(site) for site in SITES]}))
    return file


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unpack(tmp_path)
    reports = [report(3), report(9)]
    monkeypatch.setattr(scorer, "audit", lambda package, folder, config: iter(reports))
    arguments = ["--root", str(tmp_path), "--labels", str(write_labels(tmp_path)), "--json"]
    assert scorer.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["recall"] == 1.0
    reports.pop()
    assert scorer.main(arguments) == 1
    assert json.loads(capsys.readouterr().out)["missed"][0]["line"] == 9


def test_the_command_refuses_what_it_cannot_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = str(write_labels(tmp_path))
    assert scorer.main(["--root", str(tmp_path), "--labels", labels]) == 2
    assert "pip download" in capsys.readouterr().err
    assert scorer.main(["--root", str(tmp_path), "--labels", labels, "--package", "nothing"]) == 2
    assert "no labels for nothing" in capsys.readouterr().err


def test_the_judgements_are_well_formed() -> None:
    sites = read_labels(scorer.HERE / "labels.json")
    assert list(sites) == sorted(sites, key=lambda s: (s.package, s.file, s.line, s.column))
    assert len({(s.package, s.file, s.line, s.column) for s in sites}) == len(sites) >= 100
    assert {s.verdict for s in sites} == {"leak", "clean"}
    assert not [s for s in sites if s.leaks and s.exception_only]
    assert all(s.reason and s.text and s.protocol and s.column > 0 for s in sites)
