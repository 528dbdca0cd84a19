"""From paths to test files: targets, findings to aim at, plans, rendered tests, the support beside them."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from auditor.leaktests.plan import Aim, Recipe
from auditor.leaktests.probing import SECONDS, Planned, Probe, plan_all
from auditor.leaktests.render import file_name, render
from auditor.leaktests.targets import Found, find_targets
from auditor.leaktests.workshop import Workshop
from auditor.leaktests.writing import Written, write_generated
from auditor.model import Failure, Finding
from auditor.source.discover import SourceFile

SUPPORT = "leak_support"
_AIMED = ("PA1",)
_BY_EXCEPTION = ("PA103", "PA109", "PA111")


@dataclass(frozen=True, slots=True)
class Order:
    """What to generate, where to, and how to go about it. `around` are files that are read for what the
    targets of `files` may need: configuration classes, bases."""

    files: Sequence[SourceFile]
    findings: Sequence[Finding]
    folder: Path
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    device: str = "cpu"
    seconds: float = SECONDS
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None
    around: Sequence[SourceFile] = ()


@dataclass(slots=True)
class Generated:
    """What came of it. `unknown` are recipes for targets that are not there."""

    planned: Planned
    written: Written
    failures: list[Failure]
    unknown: list[str]


def _within(order: Order, found: Found) -> Found:
    """The targets and failures of the order's own files, with the configuration classes of all."""
    if not order.around:
        return found
    ours = {file.path for file in order.files}
    targets = [target for target in found.targets if target.path in ours]
    return Found(targets, found.configs, [failure for failure in found.failures if failure.path in ours])


def generate(order: Order, shop: Workshop) -> Generated:
    """Plan everything in `order.files` and write a test file for each plan."""
    found = _within(order, find_targets([*order.files, *order.around]))
    probe = Probe(
        order.device, order.seconds, order.recipes, aims(order.findings, order.files), order.progress
    )
    planned = plan_all(found, probe, shop)
    written = Written()
    for plan in planned.plans:
        write_generated(order.folder / file_name(plan), render(plan, order.folder.resolve()), written)
    if planned.plans:
        _write_support(order.folder, written)
    keys = {plan.target.key for plan in planned.plans} | {entry.target.key for entry in planned.unplanned}
    unknown = sorted(set(order.recipes) - keys)
    return Generated(planned, written, found.failures, unknown)


def aims(findings: Iterable[Finding], files: Iterable[SourceFile]) -> tuple[Aim, ...]:
    """The leak findings, with the lines on their way."""
    locations = {file.path: os.path.realpath(file.location) for file in files}
    found = []
    for finding in findings:
        location = locations.get(finding.span.path)
        if location is None or not finding.code.startswith(_AIMED):
            continue
        lines = sorted({finding.span.line, *(s.line for s in finding.trace if s.path == finding.span.path)})
        where = f"{finding.span.path}:{finding.span.line}"
        found.append(
            Aim(
                finding.fingerprint,
                finding.code,
                location,
                finding.span.line,
                tuple(lines),
                where,
                finding.message,
                finding.symbol,
                finding.code in _BY_EXCEPTION,
            )
        )
    return tuple(found)


def _write_support(folder: Path, written: Written) -> None:
    source = Path(__file__).parent / "support"
    for file in sorted(source.glob("*.py")):
        write_generated(folder / SUPPORT / file.name, file.read_text("utf-8"), written)
