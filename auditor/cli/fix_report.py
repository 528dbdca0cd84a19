"""What `fix` says on standard error: what it fixed, what it left, and why."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import click

from auditor.cli.asking import DECLINED
from auditor.cli.output import width
from auditor.fixes.repair import Left
from auditor.fixing import Fixing
from auditor.model import Finding
from reports._text import safe, wrap

INDENT = 10
WITHOUT = "without a fix"


@dataclass(frozen=True, slots=True)
class Told:
    """`refused` says of paths that were not written why; `would` that nothing was written on purpose."""

    fixing: Fixing
    refused: Mapping[str, str]
    would: bool
    verbose: bool
    quiet: bool


def tell(told: Told) -> None:
    for line in _lines(told):
        click.echo(line, err=True)


def _lines(told: Told) -> Iterator[str]:
    repaired = told.fixing.repaired
    word = "Would fix" if told.would else "Fixed"
    for finding in repaired.fixed:
        why = _unwritten(finding, told.refused)
        if why:
            yield from _entry("Failed", finding, f"not written: {why}")
        elif not told.quiet and finding.fix is not None:
            yield from _entry(word, finding, finding.fix.description)
    for left in repaired.left:
        if left.failed:
            yield from _entry("Failed", left.finding, f"fix dropped: {left.reason}")
        elif not told.quiet and (told.verbose or left.finding.fix is not None):
            yield from _entry("Left", left.finding, left.reason)
    for failure in told.fixing.run.failures:
        place = f"{failure.path}:{failure.line}" if failure.line else failure.path
        yield safe(f"Not analysed: {place}: {failure.message}")
    if not told.quiet:
        yield from wrap(_verdict(told), width())


def _entry(word: str, finding: Finding, text: str) -> Iterator[str]:
    span = finding.span
    yield safe(f"{word:<{INDENT}}{span.path}:{span.line}: {finding.code} {finding.name}")
    yield from wrap(text, width(), first=INDENT, hanging=INDENT)


def _unwritten(finding: Finding, refused: Mapping[str, str]) -> str:
    for edit in finding.fix.edits if finding.fix else ():
        if edit.span.path in refused:
            return f"{edit.span.path} {refused[edit.span.path]}"
    return ""


def _verdict(told: Told) -> str:
    repaired = told.fixing.repaired
    if not told.fixing.files:
        return "Nothing was fixed: no Python file there, or all are excluded."
    written = [finding for finding in repaired.fixed if not _unwritten(finding, told.refused)]
    paths = {edit.span.path for finding in written for edit in (finding.fix.edits if finding.fix else ())}
    word = "Would fix" if told.would else "Fixed"
    done = f"{word} {_count(len(written), 'finding')} in {_count(len(paths), 'file')}"
    reasons = Counter(_kind(left) for left in repaired.left)
    if len(written) < len(repaired.fixed):
        reasons["could not be written"] += len(repaired.fixed) - len(written)
    listed = ", ".join(f"{count} {kind}" for kind, count in reasons.most_common())
    listed += " (--verbose says why)" if WITHOUT in reasons and not told.verbose else ""
    left = f"{sum(reasons.values())} left: {listed}" if reasons else "none left"
    unread = len({failure.path for failure in told.fixing.run.failures})
    unknown = f"; {_count(unread, 'file')} not analysed" if unread else ""
    if not (written or reasons):
        return f"Nothing was fixed{unknown}." if unread else "Nothing to fix."
    return f"{done}; {left}{unknown}."


def _kind(left: Left) -> str:
    if left.failed:
        return "whose fix was dropped"
    if left.finding.fix is None:
        return WITHOUT
    if left.reason == DECLINED:
        return DECLINED
    return "with --unsafe-fixes" if "--unsafe-fixes" in left.reason else f"({left.reason})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
