"""GitLab's code quality report: findings shown beside the lines of a merge request."""

import hashlib
import json
from collections import Counter
from typing import Any

from auditor.model import Failure, Finding, Run, Severity
from reports._text import safe

_SEVERITY = {Severity.ERROR: "major", Severity.WARNING: "minor", Severity.INFO: "info"}


def render(run: Run, *, color: bool, width: int) -> str:
    """A list of violations; files that could not be analysed are violations too, or nobody would see them."""
    met: Counter[str] = Counter()
    violations = [_finding(finding, met) for finding in run.findings]
    violations += [_failure(failure, met) for failure in run.failures]
    return json.dumps(violations, indent=1) + "\n"


def _finding(finding: Finding, met: Counter[str]) -> dict[str, Any]:
    return {
        "description": safe(f"{finding.code} {finding.message}"),
        "check_name": f"{finding.code} {finding.name}",
        "fingerprint": _unique(f"{finding.fingerprint}\0{finding.span.path}", met),
        "severity": _SEVERITY[finding.severity],
        "location": _location(finding.span.path, finding.span.line, finding.span.end_line),
    }


def _failure(failure: Failure, met: Counter[str]) -> dict[str, Any]:
    return {
        "description": safe(f"not analysed: {failure.message}"),
        "check_name": "poolaudit not-analysed",
        "fingerprint": _unique(f"not analysed\0{failure.path}", met),
        "severity": "critical",
        "location": _location(failure.path, max(failure.line, 1), max(failure.line, 1)),
    }


def _location(path: str, first: int, last: int) -> dict[str, Any]:
    return {"path": safe(path), "lines": {"begin": first, "end": last}}


def _unique(text: str, met: Counter[str]) -> str:
    """GitLab shows one violation a fingerprint, so twins are told apart by file, then by number."""
    number = met[text]
    met[text] += 1
    return hashlib.sha256(f"{text}\0{number}".encode("utf-8", "replace")).hexdigest()
