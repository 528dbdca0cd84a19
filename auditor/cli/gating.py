"""What `poolaudit gate` does once its options are read: audit, plan, test, then one verdict."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from auditor.cli.auditing import AuditOptions, request_of, settings_of
from auditor.cli.gate_report import Verdict, tell, write_reports
from auditor.cli.leaktesting import recipes_of
from auditor.cli.output import targets
from auditor.cli.progress import ProgressBar
from auditor.engine import Audited, audit
from auditor.leaktests.generate import Order, generate
from auditor.leaktests.proofs import FILE as PROOFS
from auditor.leaktests.proofs import with_proofs, write_proofs
from auditor.leaktests.running import TestOrder, run_files
from auditor.leaktests.verdicts import proofs_of
from auditor.leaktests.workshop import Workshop, need_pytest, workshop
from auditor.settings_file import Effective
from auditor.source.discover import discover

_NOT_OFFERED: Mapping[str, Any] = {
    "write_baseline": None,
    "history": None,
    "exit_zero": False,
    "statistics": False,
}


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The audit's options by name, and the gate's own."""

    audit: Mapping[str, Any]
    device: str
    recipes: Path | None
    timeout: float


def run_gate(options: GateOptions) -> int:
    """Everything in turn; the exit status."""
    auditing = AuditOptions(**{**_NOT_OFFERED, **options.audit})
    wanted = targets(auditing.format, auditing.output)
    settings = settings_of(auditing)
    need_pytest()
    shown = not (auditing.quiet or auditing.no_progress)
    with workshop() as shop, ProgressBar(shown=shown) as progress:
        device = shop.device(options.device)
        audited = audit(request_of(auditing, settings, progress))
        verdict = _tested(audited, auditing, settings, options, shop, device, progress)
    write_reports(verdict, wanted, color=auditing.color)
    tell(verdict, verbose=auditing.verbose, quiet=auditing.quiet, color=auditing.color)
    return verdict.status


def _tested(
    audited: Audited,
    auditing: AuditOptions,
    settings: Effective,
    options: GateOptions,
    shop: Workshop,
    device: str,
    progress: ProgressBar,
) -> Verdict:
    """The leak tests, and the run with what they proved."""
    recipes = recipes_of(options.recipes, settings)
    paths = auditing.paths or (".",)
    files = discover(paths, root=str(settings.root), exclude=settings.settings.exclude).files
    with tempfile.TemporaryDirectory(prefix="poolaudit-gate-") as name:
        folder = Path(name)
        order = Order(files, audited.selected, folder, recipes, device, progress=progress.advance)
        generated = generate(order, shop)
        tests = [file for file in generated.written.files if file.parent == folder]
        runs = run_files(TestOrder(sorted(tests), device, options.timeout, progress.advance), shop)
    store = settings.root / PROOFS
    found = proofs_of(generated.planned.plans, runs)
    try:
        write_proofs(store, device, found, audited.selected)
        proven = tuple(with_proofs(audited.run.findings, store))
    except OSError as error:
        click.echo(f"poolaudit: warning: {store}: proofs are not kept: {error.strerror}", err=True)
        proven = tuple(replace(f, proof=found.get(f.fingerprint, f.proof)) for f in audited.run.findings)
    return Verdict(replace(audited.run, findings=proven), generated, tuple(runs), device)
