"""The gate's verdict: what counts towards it, how it is printed, and as one JUnit file."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import click

from auditor.atomic import write_atomically
from auditor.cli.output import NARROW, Target, colored, width, write
from auditor.leaktests.generate import Generated
from auditor.leaktests.proofs import CONFIRMED, NOT_REPRODUCED, NOT_RUN
from auditor.leaktests.running import Case, FileRun
from auditor.model import Finding, Run, Safety, Severity
from reports._text import safe

GOOD, BAD, FAILED = 0, 1, 2
_MESSAGE_LINES = 12


@dataclass(frozen=True, slots=True)
class Verdict:
    """Everything that the verdict rests on."""

    run: Run
    generated: Generated
    tests: tuple[FileRun, ...]
    device: str

    @property
    def findings(self) -> list[Finding]:
        """Those that count: what is only informative does not stop a gate."""
        return [finding for finding in self.run.findings if finding.severity is not Severity.INFO]

    @property
    def fixes(self) -> list[Finding]:
        """What `poolaudit fix` would do by itself."""
        return [f for f in self.run.findings if f.fix and f.fix.safety is Safety.SAFE and f.fix.edits]

    @property
    def failed(self) -> list[tuple[FileRun, Case]]:
        """Tests that did not pass."""
        return [(run, case) for run in self.tests for case in run.bad]

    @property
    def status(self) -> int:
        """What could not be judged outweighs what was judged bad."""
        if self.run.failures or self.generated.failures:
            return FAILED
        bad = self.findings or self.fixes or self.failed or self.generated.planned.short
        return BAD if bad else GOOD


def write_reports(verdict: Verdict, wanted: Sequence[Target], *, color: str) -> None:
    """Every report that was asked for; JUnit has the fixes and the tests too."""
    for target in wanted:
        if target.format == "junit":
            _write_junit(verdict, target.file)
        else:
            write(verdict.run, target, color=color)


def _write_junit(verdict: Verdict, file: Path | None) -> None:
    text = junit(verdict)
    if file is None:
        sys.stdout.write(text)
        return
    try:
        write_atomically(file, text.encode("utf-8", "replace"))
    except OSError as error:
        raise click.UsageError(f"--output {file}: {error.strerror}") from error


def junit(verdict: Verdict) -> str:
    """The audit's own suite, then one of outstanding fixes, then one for each target's tests."""
    from reports import junit as audit_junit

    root = ElementTree.fromstring(
        audit_junit.render(verdict.run, color=False, width=NARROW).partition("\n")[2]
    )
    root.append(_fixes_suite(verdict))
    root.extend(_tests_suite(run) for run in verdict.tests)
    root.append(_plans_suite(verdict))
    for key, tag in (("tests", ""), ("failures", "/failure"), ("errors", "/error"), ("skipped", "/skipped")):
        for suite in root.findall("testsuite"):
            suite.set(key, str(len(suite.findall(f"testcase{tag}"))))
        root.set(key, str(len(root.findall(f"testsuite/testcase{tag}"))))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _fixes_suite(verdict: Verdict) -> Element:
    suite = Element("testsuite", name="fixes")
    for finding in verdict.fixes:
        where = f"{finding.span.path}:{finding.span.line}"
        case = SubElement(suite, "testcase", classname="fixes", name=safe(f"{finding.code} {where}"))
        assert finding.fix is not None
        SubElement(case, "failure", message=safe(f"not applied: {finding.fix.description}"))
    if not verdict.fixes:
        SubElement(suite, "testcase", classname="fixes", name="no safe fix outstanding")
    return suite


def _tests_suite(run: FileRun) -> Element:
    suite = Element("testsuite", name=safe(run.file.stem), time=f"{run.seconds:.3f}")
    for entry in run.cases:
        case = SubElement(
            suite,
            "testcase",
            classname=safe(run.file.stem),
            name=safe(entry.name),
            time=f"{entry.seconds:.3f}",
        )
        if entry.outcome != "passed":
            tag = {"failed": "failure", "error": "error", "skipped": "skipped"}[entry.outcome]
            first, *_ = entry.message.splitlines() or [""]
            told = SubElement(case, tag, message=safe(first))
            told.text = "\n".join(safe(line) for line in entry.message.splitlines())
    return suite


def _plans_suite(verdict: Verdict) -> Element:
    suite = Element("testsuite", name="plans")
    for plan in verdict.generated.planned.plans:
        SubElement(suite, "testcase", classname="plans", name=safe(plan.target.key))
    for entry in verdict.generated.planned.unplanned:
        case = SubElement(suite, "testcase", classname="plans", name=safe(entry.target.key))
        counts = entry in verdict.generated.planned.short
        SubElement(case, "failure" if counts else "skipped", message=safe(f"no plan: {entry.reason}"))
    return suite


def tell(verdict: Verdict, *, verbose: bool, quiet: bool, color: str) -> None:
    """The failed tests, then the verdict, part by part, on standard error."""
    from reports import _summary

    if not quiet:
        for run, case in verdict.failed:
            click.echo(f"{_subject(run)} {case.name}: {case.outcome}", err=True)
            for line in case.message.splitlines()[: None if verbose else _MESSAGE_LINES]:
                click.echo(f"    {safe(line)}", err=True)
        for entry in verdict.generated.planned.unplanned:
            if verbose or entry in verdict.generated.planned.short:
                where = f"{entry.target.path}:{entry.target.line}"
                click.echo(f"{where}: {entry.target.name}: no plan: {safe(entry.reason)}", err=True)
                for attempt in entry.attempts if verbose or entry.reason.endswith("follows") else ():
                    click.echo(f"    {safe(attempt)}", err=True)
    sys.stderr.write(_summary.failures(verdict.run, color=colored(color, sys.stderr), width=width()))
    for failure in verdict.generated.failures:
        click.echo(f"{failure.path}:{failure.line}: {safe(failure.message)}", err=True)
    for name, bad, said in _parts(verdict):
        click.echo(f"gate: {name:<10} {'FAILED' if bad else 'passed'}  {said}", err=True)
    words = {GOOD: "good", BAD: "not good", FAILED: "none: something could not be judged"}
    click.echo(f"gate: verdict: {words[verdict.status]}", err=True)


def _parts(verdict: Verdict) -> list[tuple[str, bool, str]]:
    planned = verdict.generated.planned
    tests = sum(len(run.cases) for run in verdict.tests)
    seconds = sum(run.seconds for run in verdict.tests)
    told = f"{tests} tests of {len(verdict.tests)} targets on {verdict.device} in {seconds:.1f} s"
    told += f", {len(verdict.failed)} failed" if verdict.failed else ""
    have = sum(plan.target.kind in ("module", "autograd") for plan in planned.plans)
    plans = f"{have} of {have + len(planned.short)} modules and autograd functions have one"
    plans += "; recipes give the others one (docs/leaktests.md)" if planned.short else ""
    fixes = f"{len(verdict.fixes)} safe to apply: poolaudit fix" if verdict.fixes else "none outstanding"
    failures = bool(verdict.run.failures)
    return [
        ("audit", bool(verdict.findings) or failures, _counted(verdict)),
        ("fixes", bool(verdict.fixes), fixes),
        ("plans", bool(planned.short), plans),
        ("leak tests", bool(verdict.failed), told),
    ]


def _counted(verdict: Verdict) -> str:
    proofs = Counter(finding.proof for finding in verdict.run.findings)
    told = f"{len(verdict.findings)} finding{'' if len(verdict.findings) == 1 else 's'}"
    words = {CONFIRMED: "confirmed by a test", NOT_REPRODUCED: "not reproduced", NOT_RUN: "not run"}
    parts = [f"{proofs[proof]} {text}" for proof, text in words.items() if proofs[proof]]
    return f"{told} ({', '.join(parts)})" if parts else told


def _subject(run: FileRun) -> str:
    return run.file.stem.removeprefix("test_leaks_")
