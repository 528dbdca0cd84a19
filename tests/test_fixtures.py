"""Runs every fixture project: what is marked in the code is what is reported, line by line."""

import pytest

from auditor.arbitrate import arbitrate
from auditor.config import AnalysisSettings
from auditor.facts import Facts
from auditor.project.analysis import analyse
from auditor.rule import Rule, all_rules
from tests.marked_code import Expected, Project, functions, projects

PROJECTS = [*projects("rules"), *projects("flow")]
BALANCE = "PA1"


def _reported(project: Project) -> set[Expected]:
    facts = Facts(leases=analyse(project.sources, project.settings).leases)
    findings = arbitrate([finding for rule in all_rules() for finding in rule.check(facts)])
    return {(f.span.path, f.span.line, f.code) for f in findings if f.code.startswith(BALANCE)}


def _difference(project: Project, expected: set[Expected], reported: set[Expected]) -> str:
    lines = [f"{project.name}: the marks and the findings differ"]
    for path, line, code in sorted(expected ^ reported):
        kind = "missing " if (path, line, code) in expected else "unmarked"
        text = project.sources[path].splitlines()[line - 1].strip()
        lines.append(f"  {kind} {code} {path}:{line}: {text}")
    return "\n".join(lines)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_marks_are_what_is_reported(project: Project) -> None:
    expected = {mark for mark in project.expected() if mark[2].startswith(BALANCE)}
    reported = _reported(project)
    if expected != reported:
        pytest.fail(_difference(project, expected, reported), pytrace=False)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
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


def _codes(source: str) -> set[str]:
    facts = Facts(leases=analyse({"example.py": source}, AnalysisSettings()).leases)
    return {finding.code for rule in all_rules() for finding in rule.check(facts)}


def _flow_rules() -> list[Rule]:
    return [rule for rule in all_rules() if rule.meta.code.startswith(BALANCE)]


@pytest.mark.parametrize("rule", _flow_rules(), ids=lambda rule: rule.meta.code)
def test_bad_fires_and_good_is_silent(rule: Rule) -> None:
    assert rule.meta.code in _codes(rule.bad)
    assert _codes(rule.good) == set()
