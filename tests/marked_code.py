"""Reads marked code: a fixture project, its settings in a first-line comment, the findings it expects."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from auditor.config import AnalysisSettings, ProtocolSettings

FIXTURES = Path(__file__).parent / "fixtures"
_MARK = re.compile(r"#\s*expect:\s*(PA\d{3}(?:\s*,\s*PA\d{3})*)")
_HEADER = re.compile(r"#\s*settings:\s*(\{.*\})\s*$")

Expected = tuple[str, int, str]  # path, line, code


@dataclass(frozen=True, slots=True)
class Project:
    """One file, or one directory of files, that is analysed alone."""

    name: str
    sources: dict[str, str]
    settings: AnalysisSettings

    def expected(self) -> set[Expected]:
        return {mark for path, text in self.sources.items() for mark in _marks(path, text)}


def _marks(path: str, text: str) -> Iterator[Expected]:
    for number, line in enumerate(text.splitlines(), 1):
        if found := _MARK.search(line):
            yield from ((path, number, code.strip()) for code in found[1].split(","))


def _files(entry: Path) -> list[Path]:
    return sorted(entry.rglob("*.py")) if entry.is_dir() else [entry]


def _settings(sources: dict[str, str]) -> AnalysisSettings:
    headers = [_HEADER.match(text.partition("\n")[0]) for text in sources.values()]
    given = [json.loads(header[1]) for header in headers if header]
    assert len(given) <= 1, "one file of a project carries the settings"
    return settings_from(given[0] if given else {})


def settings_from(keys: dict) -> AnalysisSettings:
    """The contract's settings keys as the analysis takes them."""
    return AnalysisSettings(
        exceptions=keys.get("exceptions", "calls"),
        protocols=tuple(_protocol(table) for table in keys.get("protocols", ())),
        enable_protocols=tuple(keys.get("enable-protocols", ())),
        disable_protocols=tuple(keys.get("disable-protocols", ())),
    )


def _protocol(table: dict) -> ProtocolSettings:
    return ProtocolSettings(**{k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})


def projects(folder: str) -> list[Project]:
    """Every project of a fixtures folder: a directory is one, and so is a single file."""
    found = []
    for entry in sorted((FIXTURES / folder).iterdir()):
        if entry.name == "__pycache__" or not (entry.is_dir() or entry.suffix == ".py"):
            continue
        sources = {
            str(p.relative_to(FIXTURES / folder)): p.read_text(encoding="utf-8") for p in _files(entry)
        }
        found.append(Project(f"{folder}/{entry.name}", sources, _settings(sources)))
    return found


def functions(text: str) -> Iterator[tuple[str, range]]:
    """Top-level functions and classes with the lines they span, decorators included."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield node.name, range(first, (node.end_lineno or first) + 1)
