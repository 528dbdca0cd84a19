"""What `poolaudit fix` does once its options are read: plan, show or write, say what was left and why."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import click

from auditor.cli.asking import Asking
from auditor.cli.auditing import CLEAN, FAILED, FOUND, AuditOptions, request_of, settings_of
from auditor.cli.fix_report import Told, tell
from auditor.cli.progress import ProgressBar
from auditor.fixes.diff import unified
from auditor.fixes.document import Document
from auditor.fixes.verify import Verifier, verifier
from auditor.fixes.write import Change, unwritable, write_all
from auditor.fixing import Fixing, plan_fixes
from auditor.git_state import uncommitted
from auditor.model import Finding, Safety
from auditor.source.discover import STDIN

NEEDS_UNSAFE = "its fix may change the program's meaning (--unsafe-fixes)"


@dataclass(frozen=True, slots=True)
class FixOptions:
    """The options of `fix`, by the names they have on the command line."""

    paths: tuple[str, ...]
    diff: bool
    unsafe_fixes: bool
    interactive: bool
    verify: bool
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    exceptions: str | None
    baseline: Path | None
    diff_base: str | None
    exit_zero: bool
    jobs: int | None
    no_cache: bool
    cache_dir: Path | None
    config: Path | None
    isolated: bool
    verbose: bool
    quiet: bool
    no_progress: bool

    def __post_init__(self) -> None:
        from_stdin = STDIN in self.paths
        if from_stdin and len(set(self.paths)) > 1:
            raise click.UsageError("`-` is standard input and cannot be fixed together with files")
        if from_stdin and (self.interactive or self.verify):
            raise click.UsageError("standard input cannot be fixed with --interactive or --verify")
        if self.diff and self.interactive:
            raise click.UsageError(
                "--diff writes nothing and asks nothing: leave out --interactive or --diff"
            )

    def as_audit(self) -> AuditOptions:
        """The options of the audit that finds what is to be fixed."""
        own = {
            field.name: getattr(self, field.name)
            for field in fields(AuditOptions)
            if hasattr(self, field.name)
        }
        nothing = {"format": (), "output": (), "write_baseline": None, "history": None, "statistics": False}
        return AuditOptions(**own | nothing | {"color": "never"})


def run_fix(options: FixOptions) -> int:
    """Plan the fixes, then print or write them; the exit status."""
    verify = _verifier() if options.verify else None
    asking = Asking() if options.interactive else None
    readiness = _Readiness(options)

    def choose(finding: Finding, documents: Mapping[str, Document]) -> str:
        if finding.fix is None:
            return ""
        if finding.fix.safety is Safety.UNSAFE and not options.unsafe_fixes:
            return NEEDS_UNSAFE
        return readiness.refuses(finding, documents) or (asking(finding, documents) if asking else "")

    audit = options.as_audit()
    with ProgressBar(shown=not (options.quiet or options.no_progress or options.interactive)) as progress:
        settings = settings_of(audit)
        request = request_of(audit, settings, progress)
        fixing = plan_fixes(request, choose)
    changes = _changes(fixing)
    refused = dict(verify(changes, settings.recipes)) if verify and changes else {}
    if options.diff:
        sys.stdout.write("".join(unified(change.before, change.after) for change in changes))
    elif STDIN in options.paths:
        _print_stdin(fixing)
    elif changes:
        _warn_of_uncommitted(changes)
        wanted = [change for change in changes if change.file.path not in refused]
        refused |= write_all(wanted, fixing.repaired.together).refused
    told = Told(fixing, refused, would=options.diff, verbose=options.verbose, quiet=options.quiet)
    tell(told)
    if fixing.run.failures:
        return FAILED
    failed = bool(refused) or readiness.refused or any(left.failed for left in fixing.repaired.left)
    return _status(options, failed, changes)


def _status(options: FixOptions, failed: bool, changes: Sequence[Change]) -> int:
    would = options.diff and bool(changes)
    return FOUND if (failed or would) and not options.exit_zero else CLEAN


class _Readiness:
    """Whether the files that a fix edits can be written at all: asked before anything is planned on them."""

    def __init__(self, options: FixOptions) -> None:
        self._writes = not options.diff and STDIN not in options.paths
        self._known: dict[str, str] = {}
        self.refused = False

    def refuses(self, finding: Finding, documents: Mapping[str, Document]) -> str:
        for edit in finding.fix.edits if self._writes and finding.fix else ():
            if why := self._obstacle(edit.span.path):
                self.refused = True
                return f"{edit.span.path} {why}"
        return ""

    def _obstacle(self, path: str) -> str:
        if path not in self._known:
            self._known[path] = unwritable(path)
        return self._known[path]


def _changes(fixing: Fixing) -> list[Change]:
    return [
        Change(fixing.files[path], fixing.before[path], document)
        for path, document in sorted(fixing.repaired.documents.items())
        if document.data != fixing.before[path].data
    ]


def _print_stdin(fixing: Fixing) -> None:
    """Standard input as it is now, byte for byte, changed or not."""
    document = fixing.repaired.documents.get(STDIN) or fixing.before[STDIN]
    sys.stdout.flush()
    sys.stdout.buffer.write(document.data)


def _warn_of_uncommitted(changes: Sequence[Change]) -> None:
    unsaved = uncommitted([change.file.location for change in changes])
    if unsaved:
        shown = ", ".join(change.file.path for change in changes if change.file.location in unsaved)
        click.echo(f"poolaudit: warning: changes that git does not have yet are in {shown}", err=True)


def _verifier() -> Verifier:
    found = verifier()
    if found is None:
        raise click.UsageError("--verify needs the generator of leak tests, which is not installed")
    return found
