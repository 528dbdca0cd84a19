"""Runs every fixture project: what is marked in the code is what is reported, line by line."""

from pathlib import Path

import pytest

from auditor.config import Settings
from auditor.rule import Rule, all_rules
from tests.marked_code import Place, Project, audited, functions, places, projects

PROJECTS = [*projects("rules"), *projects("flow")]
NAMES = [f"{project.folder.name}/{project.name}" for project in PROJECTS]


def _difference(project: Project, expected: set[Place], reported: set[Place]) -> str:
    lines = [f"{project.name}: the marks and the findings differ"]
    for path, line, code in sorted(expected ^ reported):
        kind = "missing " if (path, line, code) in expected else "unmarked"
        text = project.sources[path].splitlines()[line - 1].strip()
        lines.append(f"  {kind} {code} {path}:{line}: {text}")
    return "\n".join(lines)


@pytest.mark.parametrize("project", PROJECTS, ids=NAMES)
def test_marks_are_what_is_reported(project: Project) -> None:
    expected, reported = project.expected(), project.reported()
    if expected != reported:
        pytest.fail(_difference(project, expected, reported), pytrace=False)


@pytest.mark.parametrize("project", PROJECTS, ids=NAMES)
def test_marks_agree_with_the_names(project: Project) -> None:
    """A mark stands in a `_bad` function and every `_bad` has one; FP_ and FN_ are the known misses."""
    marked = {(path, line) for path, line, _ in project.expected()}
    for path, text in project.sources.items():
        placed: set[int] = set()
        for name, lines in functions(text):
            here = {line for line in lines if (path, line) in marked}
            placed |= here
            wanted = name.startswith("FP_") or (name.endswith("_bad") and not name.startswith("FN_"))
            assert bool(here) == wanted, f"{path}: `{name}` has marks on lines {sorted(here)}"
        outside = {line for p, line in marked if p == path} - placed
        assert not outside, f"{path}: marks outside any function on lines {sorted(outside)}"


def _codes(source: str, folder: Path) -> set[str]:
    (folder / "example.py").write_text(source, encoding="utf-8")
    return {code for _, _, code in places(audited(folder, ".", Settings(select=("ALL",))))}


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.meta.code)
def test_bad_fires_and_good_is_silent(rule: Rule, tmp_path: Path) -> None:
    assert rule.meta.code in _codes(rule.bad, tmp_path)
    assert _codes(rule.good, tmp_path) == set()
