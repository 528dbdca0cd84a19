"""Takes one release at a time out of a tree that nobody labelled, and asks whether the audit notices.

    python -m tests.field.removed_releases DIR [--rollbacks] [--most 60] [--verbose]

Any package will do, which makes this a look at code as it is, not as authors of labelled programs write
it. What is taken out is a statement that calls something named like a release. With --rollbacks only those
that stand before a `return`, `raise`, `continue` or `break` in a block of their own, as a forgotten one
would. One of each file goes at a time. It was noticed if some lease of that file is lost on a way on which
it had not been lost: on an ordinary way, or by an exception alone. Not every release that goes makes a leak:
whoever wants a rate must read what was not noticed.
"""

import argparse
import ast
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from auditor.config import AnalysisSettings, Settings
from auditor.engine import Request, audit
from auditor.flow.lease import EXCEPTIONAL
from auditor.project.analysis import analyse
from auditor.project.result import FlowResult
from tests.field.score_programs import JUDGED

RELEASE = re.compile(
    r"_*(?:\w+_)?(?:de_?alloc\w*|free(?:_\w+)?|release(?:_\w+)?|(?:give|put|hand)_?back\w*|return_(?:to_)?\w+"
    r"|recycle\w*|un_?ref\w*|\w*dec_?(?:\w+_)?ref\w*|ref_count_down|unpin\w*|unlock\w*|check_?in|putconn|reclaim\w*)"
)
GUARD = re.compile(r"lock|mutex|cond|sem|queue|event", re.IGNORECASE)
"""Words of receivers that guard other things."""

OF_TESTS = re.compile(r"(?:^|/)(?:tests?|benchmarks?)/|(?:^|/)test_")
LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Removal:
    """A statement of a file; `start` and `end` are offsets into its text as UTF-8."""

    path: str
    line: int
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """Where leases of the file are lost since: on ordinary ways, and by exceptions."""

    ordinary: tuple[str, ...]
    exceptional: tuple[str, ...]


def removals(path: str, text: str, *, rollbacks: bool) -> list[Removal]:
    """The statements of a file that may be taken out; none of a file that is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    return [
        Removal(
            path,
            node.lineno,
            lines[node.lineno - 1] + node.col_offset,
            lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0),
            ast.unparse(node),
        )
        for node in _statements(tree, rollbacks=rollbacks)
        if _releases(node)
    ]


def _statements(tree: ast.Module, *, rollbacks: bool) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        of_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for part in ("body", "orelse", "finalbody"):
            suite = getattr(node, part, None)
            if not isinstance(suite, list) or not suite or isinstance(node, (ast.Module, ast.ClassDef)):
                continue
            if rollbacks and (of_function or not isinstance(suite[-1], LEAVING)):
                continue
            yield from (each for each in suite if isinstance(each, ast.Expr))


def _releases(node: ast.Expr) -> bool:
    match node.value.value if isinstance(node.value, ast.Await) else node.value:
        case ast.Call(func=ast.Attribute(value=receiver, attr=name)):
            return RELEASE.fullmatch(name) is not None and not GUARD.search(ast.unparse(receiver))
        case ast.Call(func=ast.Name(id=name)):
            return RELEASE.fullmatch(name) is not None
    return False


def without(text: str, removal: Removal) -> str:
    """The text with `pass` in the statement's place, on as many lines."""
    data = text.encode()
    rest = b"\n" * data[removal.start : removal.end].count(b"\n")
    return (data[: removal.start] + b"pass" + rest + data[removal.end :]).decode()


class Tree:
    """A copy of the package, in which files are rewritten and audited."""

    def __init__(self, package: Path, folder: Path) -> None:
        self.folder = folder
        self.name = package.name
        shutil.copytree(package, folder / package.name)
        self.settings = msgspec.convert(JUDGED, Settings)
        self.sources = {
            path.relative_to(folder).as_posix(): text
            for path in sorted((folder / package.name).rglob("*.py"))
            if not OF_TESTS.search(path.relative_to(folder).as_posix())
            if (text := _text(path)) is not None
        }
        self.lost = self._losses()

    def noticed(self, batch: Sequence[Removal]) -> Iterator[tuple[Removal, Noticed]]:
        """Of removals in as many files."""
        for each in batch:
            (self.folder / each.path).write_text(without(self.sources[each.path], each))
        new = self._losses() - self.lost
        for each in batch:
            (self.folder / each.path).write_text(self.sources[each.path])
            its = sorted((at, ordinary) for path, at, ordinary in new if path == each.path)
            yield (
                each,
                Noticed(*(tuple(at for at, way in its if way is ordinary) for ordinary in (True, False))),
            )

    def _losses(self) -> set[tuple[str, str, bool]]:
        found: list[FlowResult] = []

        def keeping(
            sources: Mapping[str, str], settings: AnalysisSettings, relevant: Sequence[str]
        ) -> FlowResult:
            found.append(analyse(sources, settings, relevant))
            return found[-1]

        before = Path.cwd()
        os.chdir(self.folder)
        try:
            audit(Request((self.name,), self.settings, self.folder, analyse=keeping))
        finally:
            os.chdir(before)
        return {each for result in found for each in _ways_lost(result)}


def _text(path: Path) -> str | None:
    """None of what is no UTF-8, and left alone."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None


def _ways_lost(result: FlowResult) -> Iterator[tuple[str, str, bool]]:
    for lease in result.leases:
        at = f"{lease.span.line}: {lease.text}"
        for leak in lease.leaks:
            yield lease.span.path, f"{at}, lost at {leak.at.line}", leak.loss not in EXCEPTIONAL
        for field in lease.fields:
            yield from ((lease.span.path, f"{at}, dropped at {drop.at.line}", True) for drop in field.drops)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--rollbacks", action="store_true", help="only those before a way out of a block")
    parser.add_argument("--most", type=int, default=60, help="a sample of so many (default 60)")
    parser.add_argument("--verbose", action="store_true", help="each of them")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(wanted.package.resolve(), Path(folder).resolve())
        found = [
            each
            for path, text in tree.sources.items()
            for each in removals(path, text, rollbacks=wanted.rollbacks)
        ]
        chosen = random.Random(0).sample(found, min(wanted.most, len(found)))
        ordinary = exceptional = 0
        for batch in _one_of_each_file(sorted(chosen, key=lambda each: (each.path, each.line))):
            for each, seen in tree.noticed(batch):
                ordinary += bool(seen.ordinary)
                exceptional += not seen.ordinary and bool(seen.exceptional)
                if wanted.verbose:
                    said = (*seen.ordinary, *seen.exceptional) or ("not noticed",)
                    print(f"{each.path}:{each.line}: {each.text}\n    {said[0]}")
    print(f"{wanted.package.name}: {len(found)} releases, {len(chosen)} taken out one by one")
    print(f"noticed on an ordinary way {ordinary}, by an exception alone {exceptional}")


def _one_of_each_file(chosen: Sequence[Removal]) -> Iterator[list[Removal]]:
    by_file: dict[str, list[Removal]] = {}
    for each in chosen:
        by_file.setdefault(each.path, []).append(each)
    while by_file:
        yield [of_file.pop(0) for of_file in by_file.values()]
        by_file = {path: rest for path, rest in by_file.items() if rest}


if __name__ == "__main__":
    main()
