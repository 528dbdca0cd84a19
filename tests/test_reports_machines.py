"""The formats that other programs read, held against what those programs demand."""

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from hypothesis import given

from auditor.model import Failure, Run, Span
from reports.markdown import LIMIT
from tests.command_line import PROJECT, poolaudit
from tests.fixtures.reports.sample_runs import ACROSS, EARLY, EMPTY, HOSTILE, TYPICAL
from tests.test_reports_text import PROPERTY
from tests.test_reports_text import RUNS as ANY_RUN

SCHEMA = Path(sys.prefix) / "share" / "sarif" / "sarif-2.1.0-rtm.4.json"
RUNS = {"typical": TYPICAL, "hostile": HOSTILE, "empty": EMPTY}
LATIN1_NAME = "caf\udce9.py"


def _rendered(name: str, run: Run) -> str:
    return importlib.import_module(f"reports.{name}").render(run, color=False, width=80)


def _sarif(run: Run) -> Any:
    return json.loads(_rendered("sarif", run))


def _violations(document: Any) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with `make test`")
    if not SCHEMA.exists():
        pytest.skip("the SARIF schema comes with `make test`")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    checker = jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker())
    return [f"{list(error.path)}: {error.message}" for error in checker.iter_errors(document)]


@pytest.mark.parametrize("kind", RUNS)
def test_sarif_obeys_its_schema(kind: str) -> None:
    assert _violations(_sarif(RUNS[kind])) == []


def test_sarif_of_the_example_obeys_its_schema() -> None:
    done = poolaudit(
        "audit", "examples/longdoc", "--isolated", "--format", "sarif", "--no-cache", cwd=PROJECT
    )
    document = done.json
    assert _violations(document) == []
    run = document["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert {result["ruleId"] for result in run["results"]} >= {"PA101", "PA102", "PA302"}
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    early = next(rule for rule in rules if rule["id"] == "PA102")["help"]
    assert "## What" in early["markdown"]
    assert "```python" in early["markdown"]
    assert "##" not in early["text"]


def test_the_schema_is_able_to_complain() -> None:
    document = _sarif(TYPICAL)
    document["runs"][0]["results"][0]["level"] = "fatal"
    document["runs"][0]["tool"]["colour"] = 1
    assert len(_violations(document)) == 2


def test_sarif_carries_path_fix_and_fingerprint() -> None:
    results = {result["ruleId"]: result for result in _sarif(TYPICAL)["runs"][0]["results"]}
    early = results["PA102"]
    steps = early["codeFlows"][0]["threadFlows"][0]["locations"]
    assert [step["location"]["physicalLocation"]["region"]["startLine"] for step in steps] == [5, 6, 7]
    assert [place["id"] for place in early["relatedLocations"]] == [1, 2]
    assert early["partialFingerprints"] == {"poolauditFingerprint/v1": "5e1f"}
    assert early["fixes"][0]["artifactChanges"][0]["replacements"] == [
        {
            "deletedRegion": {"startLine": 7, "startColumn": 1, "endLine": 7, "endColumn": 1},
            "insertedContent": {"text": "                self.pool.deallocate(part)\n"},
        }
    ]
    assert "fixes" not in results["PA107"]  # advice without edits
    assert "codeFlows" not in results["PA302"]
    assert results["PA302"]["level"] == "note"


def test_sarif_names_files_by_their_bytes() -> None:
    finding = replace(EARLY, span=replace(EARLY.span, path=f"a b/100%/{LATIN1_NAME}"), trace=())
    location = _sarif(replace(TYPICAL, findings=(finding,)))["runs"][0]["results"][0]["locations"][0]
    uri = location["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "a%20b/100%25/caf%E9.py"
    assert unquote(uri, errors="surrogateescape") == f"a b/100%/{LATIN1_NAME}"


def test_sarif_is_strict_json() -> None:
    """Lone surrogates are refused by strict readers even where they are escaped."""
    assert not re.search(r"\\ud[89a-f]", _rendered("sarif", HOSTILE))


def test_gitlab_fingerprints_are_unique() -> None:
    elsewhere = replace(EARLY, span=replace(EARLY.span, path="other.py"))
    failures = (Failure("x.py", 0, "odd"), Failure("x.py", 3, "odder"))
    run = replace(TYPICAL, findings=(EARLY, EARLY, elsewhere), failures=failures)
    violations = json.loads(_rendered("gitlab", run))
    assert len({violation["fingerprint"] for violation in violations}) == len(violations) == 5
    assert {violation["severity"] for violation in violations} == {"major", "critical"}
    assert all(violation["location"]["lines"]["begin"] >= 1 for violation in violations)


def test_gitlab_fingerprints_ignore_lines() -> None:
    moved = replace(EARLY, span=Span("longdoc/ring.py", 50, 20, 50, 97))
    one, other = (json.loads(_rendered("gitlab", replace(EMPTY, findings=(f,)))) for f in (EARLY, moved))
    assert one[0]["fingerprint"] == other[0]["fingerprint"]


def test_junit_counts_what_it_holds() -> None:
    suite = ElementTree.fromstring(_rendered("junit", TYPICAL)).find("testsuite")
    assert suite is not None
    counts = {key: suite.attrib[key] for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "3", "errors": "2", "skipped": "1"}
    assert len(suite.findall("testcase")) == 6


def test_junit_survives_hostile_text() -> None:
    suite = ElementTree.fromstring(_rendered("junit", HOSTILE))
    failure = suite.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.attrib["message"].startswith("`buf` [blink]is never released\u241b[31m")


def test_markdown_fits_into_a_comment() -> None:
    many = replace(TYPICAL, findings=(EARLY, ACROSS) * 2500)
    text = _rendered("markdown", many)
    assert 60_000 < len(text.encode()) < LIMIT
    shown = text.count("<details><summary><b>")
    assert f"**{5000 - shown:,} more** did not fit" in text
    assert text.count("</details>") == text.count("<details>") == shown + 1  # and the recommendations
    assert "PA108" not in text.partition("<details><summary><b>")[2]  # errors alone fill it


def test_markdown_never_exceeds_its_limit() -> None:
    long = "é" * 3_000
    huge = replace(EARLY, message=f"`{long}` {long * 30}", span=replace(EARLY.span, path=long), symbol=long)
    failures = tuple(Failure(f"{long}{n}", 0, long) for n in range(200))
    run = replace(TYPICAL, findings=(huge,) * 50, failures=failures)
    assert len(_rendered("markdown", run).encode()) < LIMIT


EVIL_TEXTS = ("@everyone <img src=x>", "`@me` [a](javascript:x)", "</summary> **x** #1 $x$ www.x.org")


@pytest.mark.parametrize("evil", EVIL_TEXTS)
def test_markdown_keeps_text_text(evil: str) -> None:
    finding, failure = replace(EARLY, message=evil, trace=()), Failure(evil, 1, evil)
    text = _rendered("markdown", replace(EMPTY, findings=(finding,), failures=(failure,)))
    outside = re.sub(r"(?s)(`{3,})text\n.*?\1", "", text)
    tags = {"<details>", "</details>", "<summary>", "</summary>", "<b>", "</b>", "<code>", "</code>"}
    assert set(re.findall(r"<[^>]*>", outside)) <= tags
    assert not re.search(r"@|\]\(|(?<!&)#1|\*\*x|\$|www\.", outside.partition("**Not analysed**")[2])


def test_a_fence_is_longer_than_any_in_the_code() -> None:
    excerpts = {"longdoc/ring.py": {5: '        """````` ~~~ ```"""'}}
    text = _rendered("markdown", replace(TYPICAL, findings=(replace(EARLY, trace=()),), excerpts=excerpts))
    assert text.count("\n``````text\n") == text.count("\n``````\n") == 1


@pytest.mark.slow
@PROPERTY
@given(ANY_RUN)
def test_property_every_format_can_be_read_back(run: Run) -> None:
    assert _violations(_sarif(run)) == []
    assert len(json.loads(_rendered("gitlab", run))) == len(run.findings) + len(run.failures)
    cases = ElementTree.fromstring(_rendered("junit", run)).findall("testsuite/testcase")
    assert len(cases) == max(len(run.findings) + len(run.failures), 1)
    assert len(_rendered("markdown", run).encode()) < LIMIT
    page = re.findall(r'(?s)<script type="application/json" id="data">(.*?)</script>', _rendered("html", run))
    assert [len(json.loads(data)["findings"]) for data in page] == [len(run.findings)]
