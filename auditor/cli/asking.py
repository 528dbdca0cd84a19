"""`fix --interactive`: one fix after the other is shown with its path, and applied only on a yes."""

import sys
from collections.abc import Mapping

import click

from auditor.fixes.apply import Fate, apply
from auditor.fixes.diff import unified
from auditor.fixes.document import Document
from auditor.fixes.lines import split
from auditor.model import Finding
from reports._text import safe

DECLINED = "declined"
CHOICES = "y: apply, n: leave, a: apply all of {code}, q: apply no more [y/n/a/q]"


class Asking:
    """Remembers every answer: a fix that has to wait for another pass is not asked about twice."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], str] = {}
        self._all: set[str] = set()
        self._ended = False

    def __call__(self, finding: Finding, documents: Mapping[str, Document]) -> str:
        key = (finding.span.path, finding.fingerprint)
        if key not in self._answers:
            self._answers[key] = self._answer(finding, documents)
        return self._answers[key]

    def _answer(self, finding: Finding, documents: Mapping[str, Document]) -> str:
        if self._ended:
            return DECLINED
        if finding.code in self._all:
            return ""
        self._show(finding, documents)
        answer = self._ask(finding.code)
        if answer == "a":
            self._all.add(finding.code)
        self._ended = answer == "q"
        return "" if answer in ("y", "a") else DECLINED

    def _show(self, finding: Finding, documents: Mapping[str, Document]) -> None:
        assert finding.fix is not None
        span, fix = finding.span, finding.fix
        click.echo("\n" + safe(f"{span.path}:{span.line}: {finding.code} {finding.message}"), err=True)
        for step in finding.trace:
            where = "" if step.path == span.path else f"{step.path}:"
            click.echo(safe(f"    {where}{step.line}: {step.note}"), err=True)
        click.echo(safe(f"{fix.safety} fix: {fix.description}"), err=True)
        result = apply([fix], documents)
        for path, document in result.documents.items():
            for line in split(unified(documents[path], document)):
                click.echo(safe(line.rstrip("\r\n")), err=True)
        if result.outcomes[0].fate is not Fate.APPLIED:
            click.echo(safe(result.outcomes[0].reason), err=True)

    def _ask(self, code: str) -> str:
        """One of the choices; the end of the input is `q`."""
        while True:
            click.echo(CHOICES.format(code=code) + " ", nl=False, err=True)
            line = sys.stdin.readline()
            answer = line.strip().lower()
            if not line:
                click.echo("q", err=True)
                return "q"
            if answer in ("y", "n", "a", "q"):
                return answer
