"""A finished run: everything a report may show, and nothing that needs the sources again."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from auditor.model.finding import Finding, Severity


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that could not be analysed (`line` 0: the file as a whole)."""

    path: str
    line: int
    message: str


WHOLE_TREE = "."
"""The path of a failure that no single file is to blame for."""


def confession(error: Exception) -> str:
    """How a fault of the audit's own is told of the file that it met: what it was, and where in the audit."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    at = f"{PurePath(where.filename).name}:{where.lineno}"
    return f"internal error: {type(error).__name__}: {error} ({at}; please report it)"


@dataclass(frozen=True, slots=True)
class ProtocolUse:
    """How often one acquire/release protocol was met. `origin`: settings, discovered or built-in."""

    name: str
    origin: str
    acquires: int
    releases: int


@dataclass(frozen=True, slots=True)
class ClassRow:
    """A class that uses a pool, or a module that allocates large tensors on its forward path."""

    name: str
    path: str
    line: int
    bases: tuple[str, ...]
    switch: str | None
    switch_default: bool | None
    acquires: bool
    releases: bool
    cleans_up: bool
    support: str  # full | partial | none
    priority: str | None  # high | medium | low
    estimated_bytes: str | None
    reason: str = ""  # why that priority, in a phrase; not part of JSON version 1
    edits: int | None = None  # places to edit until support is full; not part of JSON version 1 either


@dataclass(frozen=True, slots=True)
class SwitchUse:
    """A pool switch by its name, and how many classes declare it on, off or without a default."""

    name: str
    on: int
    off: int
    undecided: int


@dataclass(frozen=True, slots=True)
class Conventions:
    """What the project calls its pool's parts, by its settings (`declared`) or by most of its classes."""

    acquire: str | None = None
    release: str | None = None
    switch: str | None = None
    default: bool | None = None
    declared: tuple[str, ...] = ()
    other_acquires: tuple[str, ...] = ()  # that classes use beside the standard
    other_releases: tuple[str, ...] = ()
    switches: tuple[SwitchUse, ...] = ()
    unused_imports: tuple[str, ...] = ()  # `path:line name`


@dataclass(frozen=True, slots=True)
class RuleInfo:
    """What reports say of a rule. `page` is its documentation: headings and paragraphs of Markdown."""

    code: str
    name: str
    severity: Severity
    default: bool
    page: str
    bad: str
    good: str


@dataclass(frozen=True, slots=True)
class Point:
    """One earlier run in the history; `time` is UTC, `2026-01-31T12:00:00Z`."""

    time: str
    files: int
    lines: int
    errors: int
    warnings: int
    infos: int
    failures: int
    full: int
    partial: int
    none: int


@dataclass(frozen=True, slots=True)
class Summary:
    files: int = 0
    lines: int = 0
    files_failed: int = 0
    seconds: float = 0.0
    acquires: int = 0
    followed: int = 0
    not_followed: int = 0
    protocols: tuple[ProtocolUse, ...] = ()
    files_importing_pool: int = 0
    files_using_pool: int = 0
    classes_with_pool_switch: int = 0
    switch_default_on: int = 0
    switch_default_off: int = 0
    acquire_names: tuple[str, ...] = ()
    release_names: tuple[str, ...] = ()
    findings: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """`excerpts[path][line]` is the source text of every line that a finding, its trace or its context names.

    `unfollowed` says, for --verbose, which acquires were given up on and why. `rules` are all that exist,
    `known` counts the findings that a baseline or --diff-base kept out, `history` ends with this run.
    """

    version: str
    summary: Summary
    classes: tuple[ClassRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    failures: tuple[Failure, ...] = ()
    unfollowed: tuple[Failure, ...] = ()
    conventions: Conventions = field(default_factory=Conventions)
    excerpts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    rules: tuple[RuleInfo, ...] = ()
    known: int = 0
    paths: tuple[str, ...] = ()  # as they were given to the audit; `-` is standard input
    history: tuple[Point, ...] = ()
