"""SARIF 2.1.0: what code scanning services and editors read."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any
from urllib.parse import quote

from auditor.model import Edit, Failure, Finding, FixOffer, RuleInfo, Run, Severity, Span, Step
from reports import _rule_page

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "%SRCROOT%"  # the working directory; only the reader knows where that is
FINGERPRINT = "poolauditFingerprint/v1"
_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_PROBLEM = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "recommendation"}
_UNENCODABLE = re.compile("[\ud800-\udfff]")
_NO_FILE_NAME = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # U+DC80 to U+DCFF stand for bytes in names

Object = dict[str, Any]


def render(run: Run, *, color: bool, width: int) -> str:
    """One run. Columns count characters, which `columnKind` says."""
    rules = _rule_page.shown(run)
    index = {rule.code: number for number, rule in enumerate(rules)}
    document = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver(run, rules)},
                "columnKind": "unicodeCodePoints",
                "originalUriBaseIds": {ROOT: {"description": {"text": "The directory of the audit."}}},
                "invocations": [_invocation(run)],
                "results": [_result(finding, index, run.excerpts) for finding in run.findings],
            }
        ],
    }
    return json.dumps(_encodable(document), indent=1) + "\n"


def _driver(run: Run, rules: Sequence[RuleInfo]) -> Object:
    return {
        "name": "poolaudit",
        "version": run.version,
        "semanticVersion": run.version,
        "rules": [_rule(rule) for rule in rules],
    }


def _rule(rule: RuleInfo) -> Object:
    """`problem.severity` and `tags` are what code scanning services sort by."""
    described = {section.heading: " ".join(section.paragraphs) for section in _rule_page.sections(rule)}
    short = _rule_page.title(rule)
    return {
        "id": rule.code,
        "name": "".join(part.capitalize() for part in rule.name.split("-")),
        "shortDescription": {"text": short},
        "fullDescription": {"text": described.get("What") or short},
        "help": {"text": _rule_page.text(rule), "markdown": _rule_page.markdown(rule)},
        "defaultConfiguration": {"enabled": rule.default, "level": _LEVEL[rule.severity]},
        "properties": {"problem.severity": _PROBLEM[rule.severity], "tags": ["memory", "resource-leak"]},
    }


def _invocation(run: Run) -> Object:
    return {
        "executionSuccessful": not run.failures,
        "toolExecutionNotifications": [_notification(failure) for failure in run.failures],
    }


def _notification(failure: Failure) -> Object:
    place: Object = {"artifactLocation": _artifact(failure.path)}
    if failure.line:
        place["region"] = {"startLine": failure.line}
    return {
        "level": "error",
        "message": {"text": f"not analysed: {failure.message}"},
        "locations": [{"physicalLocation": place}],
    }


def _result(finding: Finding, index: Mapping[str, int], excerpts: Mapping[str, Mapping[int, str]]) -> Object:
    result: Object = {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "level": _LEVEL[finding.severity],
        "message": {"text": finding.message},
        "locations": [_location(finding, excerpts)],
    }
    if finding.fingerprint:
        result["partialFingerprints"] = {FINGERPRINT: finding.fingerprint}
    if finding.trace:
        result["codeFlows"] = [_code_flow(finding.trace)]
    related = [step for step in finding.trace if _at(step) != _start(finding.span)]
    if related:
        result["relatedLocations"] = [{"id": n, **_step(step)} for n, step in enumerate(related, 1)]
    if finding.fix and finding.fix.edits:
        result["fixes"] = [_fix(finding.fix)]
    if finding.proof:
        result["properties"] = {"proof": finding.proof}
    return result


def _location(finding: Finding, excerpts: Mapping[str, Mapping[int, str]]) -> Object:
    span = finding.span
    place: Object = {"artifactLocation": _artifact(span.path), "region": _region(span)}
    lines = excerpts.get(span.path, {})
    covered = [lines[number] for number in range(span.line, span.end_line + 1) if number in lines]
    if covered and sum(map(len, covered)) <= 2000:  # a viewer wants a glance, not a minified file
        place["contextRegion"] = {
            "startLine": span.line,
            "endLine": span.line + len(covered) - 1,
            "snippet": {"text": "\n".join(covered)},
        }
    location: Object = {"physicalLocation": place}
    if finding.symbol:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.symbol}]
    return location


def _code_flow(trace: Sequence[Step]) -> Object:
    """The acquire and the way out matter most: a viewer may fold what lies between."""
    last = len(trace) - 1
    locations = [
        {
            "location": _step(step),
            "importance": "essential" if number in (0, last) else "important",
            "executionOrder": number + 1,
        }
        for number, step in enumerate(trace)
    ]
    return {"threadFlows": [{"locations": locations}]}


def _step(step: Step) -> Object:
    region = {"startLine": step.line, "startColumn": step.column}
    return {
        "physicalLocation": {"artifactLocation": _artifact(step.path), "region": region},
        "message": {"text": step.note},
    }


def _fix(fix: FixOffer) -> Object:
    ordered = sorted(fix.edits, key=lambda edit: edit.span)
    changes = [
        {"artifactLocation": _artifact(path), "replacements": [_replacement(edit) for edit in edits]}
        for path, edits in groupby(ordered, key=lambda edit: edit.span.path)
    ]
    return {"description": {"text": fix.description}, "artifactChanges": changes}


def _replacement(edit: Edit) -> Object:
    return {"deletedRegion": _region(edit.span), "insertedContent": {"text": edit.replacement}}


def _artifact(path: str) -> Object:
    """A relative URI reference: bytes that are no UTF-8 are kept, as their percent signs."""
    name = _NO_FILE_NAME.sub("\ufffd", path)
    return {"uri": quote(name, safe="/", errors="surrogateescape"), "uriBaseId": ROOT}


def _region(span: Span) -> Object:
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }


def _at(step: Step) -> tuple[str, int, int]:
    return step.path, step.line, step.column


def _start(span: Span) -> tuple[str, int, int]:
    return span.path, span.line, span.column


def _encodable(value: Any) -> Any:
    """`value` without lone surrogates, which strict readers refuse even as escapes."""
    match value:
        case str():
            return _UNENCODABLE.sub("\ufffd", value)
        case dict():
            return {key: _encodable(item) for key, item in value.items()}
        case list():
            return [_encodable(item) for item in value]
    return value
