"""Reads marked code: a fixture project, its settings in a first-line comment, the findings it expects."""

import ast
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from auditor.config import Settings
from auditor.engine import Request, audit
from auditor.model import Run
from auditor.source.load import lines_of

FIXTURES = Path(__file__).parent / "fixtures"
_MARK = re.compile(r"#\s*expect:\s*(PA\d{3}(?:\s*,\s*PA\d{3})*)")
_HEADER = re.compile(r"#\s*settings:\s*(\{.*\})\s*$")

Place = tuple[str, int, str]  # path, line, code


@dataclass(frozen=True, slots=True)
class Project:
    """One file, or one directory of files, that is analysed alone; paths are relative to `folder`."""

    folder: Path
    name: str
    sources: dict[str, str]
    settings: Settings

    def expected(self) -> set[Place]:
        return {mark for path, text in self.sources.items() for mark in _marks(path, text)}

    def reported(self) -> set[Place]:
        return places(audited(self.folder, self.name, self.settings))


def audited(folder: Path, name: str, settings: Settings) -> Run:
    """The run of the public entry on one path below `folder`, as the command would make it there."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return audit(Request((name,), settings, folder)).run
    finally:
        os.chdir(before)


def places(run: Run) -> set[Place]:
    assert not run.failures, run.failures
    return {(finding.span.path, finding.span.line, finding.code) for finding in run.findings}


def _marks(path: str, text: str) -> Iterator[Place]:
    for number, line in enumerate(lines_of(text), 1):
        if found := _MARK.search(line):
            yield from ((path, number, code.strip()) for code in found[1].split(","))


def _files(entry: Path) -> list[Path]:
    return sorted(entry.rglob("*.py")) if entry.is_dir() else [entry]


def _settings(sources: dict[str, str]) -> Settings:
    headers = [_HEADER.match(text.partition("\n")[0]) for text in sources.values()]
    given = [json.loads(header[1]) for header in headers if header]
    assert len(given) <= 1, "one file of a project carries the settings"
    return msgspec.convert({"select": ["PA1"], **(given[0] if given else {})}, Settings)


def projects(folder: str) -> list[Project]:
    """Every project of a fixtures folder: a directory is one, and so is a single file."""
    root = FIXTURES / folder
    found = []
    for entry in sorted(root.iterdir()):
        if entry.name == "__pycache__" or not (entry.is_dir() or entry.suffix == ".py"):
            continue
        sources = {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in _files(entry)}
        found.append(Project(root, entry.name, sources, _settings(sources)))
    return found


def functions(text: str) -> Iterator[tuple[str, range]]:
    """Top-level functions and classes with the lines they span, decorators included."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield node.name, range(first, (node.end_lineno or first) + 1)
