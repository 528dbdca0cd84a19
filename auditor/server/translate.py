"""Findings in the words of the protocol: ranges, diagnostics with their path, actions, pages on hover."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from lsprotocol import types
from pygls import uris
from pygls.workspace import PositionCodec

from auditor.model import Edit, Failure, Finding, Safety, Severity, Span, Step
from auditor.rule import Rule

MARKUP = re.compile(r"[\\`*_<>\[\]#&]")
SOURCE = "poolaudit"
SEVERITIES = {
    Severity.ERROR: types.DiagnosticSeverity.Error,
    Severity.WARNING: types.DiagnosticSeverity.Warning,
    Severity.INFO: types.DiagnosticSeverity.Information,
}
Lines = Callable[[str], Sequence[str]]
"""The lines of a file by its location, as the analysis saw them."""


class Translator:
    """Columns count characters here and, as a rule, UTF-16 units there."""

    def __init__(self, codec: PositionCodec, lines: Lines) -> None:
        self._codec = codec
        self._lines = lines

    def diagnostic(self, finding: Finding) -> types.Diagnostic:
        related = [
            types.DiagnosticRelatedInformation(
                types.Location(str(uris.from_fs_path(step.path)), self._point(step)), step.note
            )
            for step in finding.trace
        ]
        return types.Diagnostic(
            range=self.range(finding.span),
            message=finding.message,
            severity=SEVERITIES[finding.severity],
            code=finding.code,
            source=SOURCE,
            related_information=related,
            data={"fingerprint": finding.fingerprint},
        )

    def failure(self, failure: Failure) -> types.Diagnostic:
        line = max(failure.line, 1) - 1
        return types.Diagnostic(
            range=types.Range(types.Position(line, 0), types.Position(line + 1, 0)),
            message=f"not analysed: {failure.message}",
            severity=types.DiagnosticSeverity.Warning,
            source=SOURCE,
        )

    def actions(self, uri: str, finding: Finding, shown: types.Diagnostic) -> Iterator[types.CodeAction]:
        """The finding's own fix, if it has one with edits, and a comment that silences it."""
        fix = finding.fix
        if fix is not None and fix.edits:
            safe = fix.safety is Safety.SAFE
            title = f"{finding.code}: {fix.description}" + ("" if safe else " (may change the meaning)")
            yield types.CodeAction(
                title,
                kind=types.CodeActionKind.QuickFix,
                diagnostics=[shown],
                is_preferred=safe,
                edit=self._workspace_edit(fix.edits),
            )
        yield types.CodeAction(
            f"{finding.code}: ignore on this line",
            kind=types.CodeActionKind.QuickFix,
            diagnostics=[shown],
            edit=types.WorkspaceEdit({uri: [self._ignoring(finding)]}),
        )

    def _workspace_edit(self, edits: Sequence[Edit]) -> types.WorkspaceEdit:
        changes: dict[str, list[types.TextEdit]] = {}
        for edit in edits:
            uri = str(uris.from_fs_path(edit.span.path))
            changes.setdefault(uri, []).append(types.TextEdit(self.range(edit.span), edit.replacement))
        return types.WorkspaceEdit(changes)

    def _ignoring(self, finding: Finding) -> types.TextEdit:
        """Alone on the line above: the end of the line may lie inside a string, or behind a backslash."""
        lines = self._lines(finding.span.path)
        line = lines[finding.span.line - 1] if finding.span.line <= len(lines) else ""
        indent = line[: len(line) - len(line.lstrip())]
        start = types.Position(finding.span.line - 1, 0)
        return types.TextEdit(types.Range(start, start), f"{indent}# poolaudit: ignore[{finding.code}]\n")

    def range(self, span: Span) -> types.Range:
        lines = self._lines(span.path)
        return types.Range(
            self._position(lines, span.line, span.column),
            self._position(lines, span.end_line, span.end_column),
        )

    def _point(self, step: Step) -> types.Range:
        at = self._position(self._lines(step.path), step.line, step.column)
        return types.Range(at, at)

    def _position(self, lines: Sequence[str], line: int, column: int) -> types.Position:
        text = lines[line - 1] if line <= len(lines) else ""
        return types.Position(line - 1, self._codec.client_num_units(text[: column - 1]))


def page(rule: Rule, findings: Sequence[Finding] = ()) -> str:
    """A rule's page as Markdown; below its title the paths of findings, which few editors show themselves."""
    bad, good = (f"```python\n{code.strip()}\n```" for code in (rule.bad, rule.good))
    title, _, rest = rule.page.strip().partition("\n\n")
    here = "".join(f"{_path(finding)}\n\n" for finding in findings if finding.trace)
    return f"{title}\n\n{here}{rest}\n\n**Bad**\n\n{bad}\n\n**Good**\n\n{good}\n"


def _path(finding: Finding) -> str:
    """Its stations as a numbered list; they quote the file, which Markdown must not interpret."""
    stations = []
    for number, step in enumerate(finding.trace, 1):
        where = "" if step.path == finding.span.path else f"{PurePath(step.path).name} "
        stations.append(f"{number}. {where}line {step.line}: {_literal(step.note)}")
    return "\n".join(stations)


def _literal(note: str) -> str:
    """A note's text; what it has between backquotes is code to Markdown as well."""
    between = note.split("`")
    if len(between) % 2 == 0:
        return MARKUP.sub(r"\\\g<0>", note)
    return "`".join(
        part if number % 2 else MARKUP.sub(r"\\\g<0>", part) for number, part in enumerate(between)
    )
