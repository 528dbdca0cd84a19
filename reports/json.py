"""JSON, version 1: what scripts rely on. Its fields and their order are a contract."""

import json
from typing import Any

from auditor.model import ClassRow, Failure, Finding, FixOffer, ProtocolUse, Run, Step, Summary

VERSION = 1


def render(run: Run, *, color: bool, width: int) -> str:
    """Pure ASCII, so that no file name and no console encoding can spoil it."""
    document = {
        "version": VERSION,
        "tool": {"name": "poolaudit", "version": run.version},
        "summary": _summary(run.summary),
        "classes": [_class(row) for row in run.classes],
        "findings": [_finding(finding) for finding in run.findings],
        "failures": [_failure(failure) for failure in run.failures],
    }
    return json.dumps(document, indent=2) + "\n"


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "files": summary.files,
        "lines": summary.lines,
        "files_failed": summary.files_failed,
        "seconds": summary.seconds,
        "acquires": summary.acquires,
        "followed": summary.followed,
        "not_followed": summary.not_followed,
        "protocols": [_protocol(use) for use in summary.protocols],
        "files_importing_pool": summary.files_importing_pool,
        "files_using_pool": summary.files_using_pool,
        "classes_with_pool_switch": summary.classes_with_pool_switch,
        "switch_default_on": summary.switch_default_on,
        "switch_default_off": summary.switch_default_off,
        "acquire_names": list(summary.acquire_names),
        "release_names": list(summary.release_names),
        "findings": dict(sorted(summary.findings.items())),
    }


def _protocol(use: ProtocolUse) -> dict[str, Any]:
    return {"name": use.name, "origin": use.origin, "acquires": use.acquires, "releases": use.releases}


def _class(row: ClassRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "path": row.path,
        "line": row.line,
        "bases": list(row.bases),
        "switch": row.switch,
        "switch_default": row.switch_default,
        "acquires": row.acquires,
        "releases": row.releases,
        "cleans_up": row.cleans_up,
        "support": row.support,
        "priority": row.priority,
        "estimated_bytes": row.estimated_bytes,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    span = finding.span
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "path": span.path,
        "line": span.line,
        "column": span.column,
        "end_line": span.end_line,
        "end_column": span.end_column,
        "symbol": finding.symbol,
        "message": finding.message,
        "trace": [_step(step) for step in finding.trace],
        "fix": _fix(finding.fix),
        "fingerprint": finding.fingerprint,
        "proof": finding.proof,
    }


def _step(step: Step) -> dict[str, Any]:
    return {"path": step.path, "line": step.line, "column": step.column, "note": step.note}


def _fix(fix: FixOffer | None) -> dict[str, Any] | None:
    return None if fix is None else {"safety": fix.safety, "description": fix.description}


def _failure(failure: Failure) -> dict[str, Any]:
    return {"path": failure.path, "line": failure.line, "message": failure.message}
