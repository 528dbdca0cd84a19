"""The page's drawings as numbers: bars of support by package, and the curve of earlier runs."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from auditor.model import ClassRow, Point, Run

SUPPORT = ("full", "partial", "none")
MOST_BARS = 20
_DEPTH = 2  # folders of a package's name on show


@dataclass(frozen=True, slots=True)
class Part:
    kind: str
    count: int
    start: float
    share: float


@dataclass(frozen=True, slots=True)
class Bar:
    """`parts` share a hundred per cent of the longest bar."""

    label: str
    count: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line over the runs; `path` is an SVG path, `dots` are (x, y, value, time)."""

    kind: str
    path: str
    dots: tuple[tuple[float, float, int, str], ...]


def packages(run: Run) -> dict[str, str]:
    """Which package each path is shown under: its folder below what all have in common, at most two deep."""
    paths = {row.path for row in run.classes} | {finding.span.path for finding in run.findings}
    folders = {path: os.path.dirname(path).split("/") for path in paths}  # noqa: PTH120 - text, no file
    shared = _shared(list(folders.values()))
    named = {path: "/".join(folder[shared : shared + _DEPTH]) for path, folder in folders.items()}
    if len(set(named.values())) > 1:
        return {path: name or "(top level)" for path, name in named.items()}
    return {path: path.rpartition("/")[2] for path in paths}


def _shared(folders: Sequence[Sequence[str]]) -> int:
    """How many leading folders all have in common."""
    levels = zip(*folders, strict=False)  # the shortest decides
    return sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))


def support(classes: Iterable[ClassRow]) -> Bar:
    """All classes in one bar."""
    counts = Counter(row.support for row in classes)
    return _bar("", counts, max(counts.total(), 1))


def by_package(classes: Iterable[ClassRow], package: Mapping[str, str]) -> tuple[list[Bar], int]:
    """A bar a package, those with most to do first; and how many packages have no bar."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in classes:
        counts[package[row.path]][row.support] += 1
    order = sorted(counts, key=lambda name: (-counts[name]["none"], -counts[name]["partial"], name))
    longest = max((counts[name].total() for name in order[:MOST_BARS]), default=1)
    return [_bar(name, counts[name], longest) for name in order[:MOST_BARS]], len(order[MOST_BARS:])


def _bar(label: str, counts: Counter[str], longest: int) -> Bar:
    parts, start = [], 0.0
    for kind in SUPPORT:
        if counts[kind]:
            share = round(100 * counts[kind] / longest, 2)
            parts.append(Part(kind, counts[kind], round(start, 2), share))
            start += share
    return Bar(label, counts.total(), tuple(parts))


_LINES: Mapping[str, Callable[[Point], int]] = {
    "error": lambda point: point.errors,
    "warning": lambda point: point.warnings,
    "info": lambda point: point.infos,
    "full": lambda point: point.full,
}


def highest(history: Sequence[Point]) -> int:
    return max((value(point) for point in history for value in _LINES.values()), default=0) or 1


def curves(history: Sequence[Point], width: int, height: int) -> list[Curve]:
    """Errors, warnings, infos and fully supported classes over the runs; what was never met has no curve."""
    top, last = highest(history), max(len(history) - 1, 1)
    found = []
    for kind, value in _LINES.items():
        if not any(map(value, history)):
            continue
        dots = tuple(
            (
                round(width * n / last, 1),
                round(height - height * value(point) / top, 1),
                value(point),
                point.time,
            )
            for n, point in enumerate(history)
        )
        found.append(Curve(kind, "M" + "L".join(f"{x} {y}" for x, y, *_ in dots), dots))
    return found
