"""What `poolaudit audit` does once its options are read: settings, audit, reports, exit status."""

import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from auditor.baseline import Known, read_baseline, unknown, write_baseline
from auditor.cache import DIRECTORY
from auditor.changed_lines import ChangedLines, changed_since
from auditor.cli.output import colored, show_effort, targets, width, write
from auditor.cli.progress import ProgressBar
from auditor.cli.settings_options import codes
from auditor.engine import Audited, Request, audit, without_collecting
from auditor.leaktests.proofs import FILE as PROOFS
from auditor.model import Finding, Run, Severity
from auditor.settings_file import Effective, effective
from auditor.source.discover import STDIN

CLEAN, FOUND, FAILED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The options of `audit`, by the names they have on the command line."""

    paths: tuple[str, ...]
    format: tuple[str, ...]
    output: tuple[str, ...]
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    exceptions: str | None
    baseline: Path | None
    write_baseline: Path | None
    diff_base: str | None
    history: Path | None
    exit_zero: bool
    statistics: bool
    jobs: int | None
    no_cache: bool
    cache_dir: Path | None
    config: Path | None
    isolated: bool
    verbose: bool
    quiet: bool
    no_progress: bool
    color: str


def run_audit(options: AuditOptions) -> int:
    """Audit, write every report, say the rest on standard error; the exit status."""
    with without_collecting(last=True):
        return _audited_and_told(options)


def _audited_and_told(options: AuditOptions) -> int:
    wanted = targets(options.format, options.output)
    settings = settings_of(options)
    with ProgressBar(shown=not (options.quiet or options.no_progress)) as progress:
        audited = audit(request_of(options, settings, progress))
    if options.write_baseline:
        write_baseline(options.write_baseline, audited.selected)
    if options.history:
        audited = _with_history(audited, options.history)
    for target in wanted:
        write(audited.run, target, color=options.color)
    _tell(audited, options)
    return status(audited.run, exit_zero=options.exit_zero)


def settings_of(options: AuditOptions) -> Effective:
    """The settings in force: those of the files, and over them those of the command line."""
    return effective(
        start(options.paths),
        config=options.config,
        isolated=options.isolated,
        overrides=_overrides(options),
    )


def _with_history(audited: Audited, file: Path) -> Audited:
    from auditor.history import HistoryError, appended  # seldom wanted

    try:
        points = appended(file, audited.run, datetime.datetime.now(datetime.UTC))
    except HistoryError as error:
        raise click.UsageError(str(error)) from error
    return replace(audited, run=replace(audited.run, history=points))


def status(run: Run, *, exit_zero: bool) -> int:
    """A file that could not be analysed outweighs findings: the verdict on the tree is not complete."""
    if run.failures:
        return FAILED
    counts = any(finding.severity != Severity.INFO for finding in run.findings)
    return FOUND if counts and not exit_zero else CLEAN


def start(paths: Sequence[str]) -> Path:
    """Where the search for settings begins: the folder that all paths have in common."""
    named = [os.path.abspath(path) for path in paths if path != STDIN]  # noqa: PTH100 - resolves `..`
    return Path(os.path.commonpath(named)) if named else Path.cwd()


def _overrides(options: AuditOptions) -> dict[str, Any]:
    """The settings that the command line replaces. A --select starts afresh, so it drops `ignore` too."""
    overrides: dict[str, Any] = {}
    if options.select:
        overrides |= {"select": codes(options.select), "ignore": codes(options.ignore)}
    elif options.ignore:
        overrides["ignore"] = codes(options.ignore)
    if options.exceptions:
        overrides["exceptions"] = options.exceptions
    return overrides


def request_of(options: AuditOptions, settings: Effective, progress: ProgressBar) -> Request:
    """The audit that the options ask for."""
    return Request(
        paths=options.paths or (".",),
        settings=settings.settings,
        root=settings.root,
        jobs=options.jobs or _processors(),
        cache_dir=None if options.no_cache else options.cache_dir or settings.root / DIRECTORY,
        progress=progress.advance,
        keep=_Filter.of(options, settings).kept,
        proofs=None if options.isolated else settings.root / PROOFS,
        effort=options.statistics or show_effort(targets(options.format, options.output)),
    )


def _processors() -> int:
    """How many this process may use, which in a container is fewer than there are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Filter:
    """What keeps a selected finding out of the report: being known, or not being on a changed line."""

    all_known: bool
    known: Sequence[Known] | None
    changed: ChangedLines | None

    @classmethod
    def of(cls, options: AuditOptions, settings: Effective) -> "_Filter":
        configured = settings.settings.baseline
        file = options.baseline or (settings.root / configured if configured else None)
        return cls(
            all_known=options.write_baseline is not None,
            known=read_baseline(file) if file and not options.write_baseline else None,
            changed=changed_since(options.diff_base, _folder(options.paths)) if options.diff_base else None,
        )

    def kept(self, findings: Sequence[Finding]) -> Sequence[Finding]:
        if self.all_known:
            return []
        if self.known is not None:
            findings = unknown(findings, self.known)
        if self.changed is not None:
            findings = [finding for finding in findings if self.changed.touch(finding)]
        return findings


def _folder(paths: Sequence[str]) -> Path:
    folder = start(paths)
    return folder if folder.is_dir() else folder.parent


def _tell(audited: Audited, options: AuditOptions) -> None:
    """Everything but the findings, on standard error."""
    from reports import _summary

    color, columns = colored(options.color, sys.stderr), width()
    if audited.warning:
        click.echo(f"poolaudit: warning: {audited.warning}", err=True)
    if options.verbose:
        sys.stderr.write(_summary.unfollowed(audited.run, color=color, width=columns))
    if options.quiet:
        sys.stderr.write(_summary.failures(audited.run, color=color, width=columns))
        return
    statistics = options.statistics
    sys.stderr.write(_summary.summary(audited.run, color=color, width=columns, statistics=statistics))
