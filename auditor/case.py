"""What a rule's `fix` is given: the finding, the facts it came from, and the sources as they were judged."""

import ast
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, takewhile

from auditor.facts import Facts, Lease
from auditor.model import Finding, Span
from auditor.source.load import Unreadable, lines_of
from auditor.source.newer_syntax import in_older_syntax
from auditor.texts import Texts


@dataclass(frozen=True)
class Parsed:
    """A file's text and its syntax tree.

    `moved` are the lines that only a newer Python can parse: their columns in the tree are not the text's
    but those of `told`, the lines in older words.
    """

    path: str
    text: str
    lines: Sequence[str]
    tree: ast.Module
    moved: frozenset[int]
    told: Sequence[str] = ()

    @cached_property
    def parents(self) -> "Parents":
        return Parents(self.tree)

    def nodes_at(self, line: int) -> Iterator[ast.AST]:
        """All nodes of the top-level statement that covers a line."""
        for statement in self._places.covering(line):
            yield from _walk(statement)

    @cached_property
    def _places(self) -> "Places":
        return Places(self.tree)

    def span(self, node: ast.AST) -> Span:
        """The node's place in characters, counted from 1 (ast counts the bytes of UTF-8)."""
        line, end = getattr(node, "lineno", 1), getattr(node, "end_lineno", 1)
        column, end_column = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0)
        return Span(
            self.path, line, self._characters(line, column) + 1, end, self._characters(end, end_column) + 1
        )

    def _characters(self, line: int, column: int) -> int:
        text = self.lines[line - 1]
        return column if text.isascii() else len(text.encode()[:column].decode(errors="ignore"))

    def stands_alone(self, node: ast.stmt, first: int) -> bool:
        """Whether the statement, from line `first` on, shares its lines with nothing but a comment."""
        lines = self.told or self.lines
        begin, end = lines[first - 1], lines[(node.end_lineno or node.lineno) - 1]
        before = lines[first - 2].rstrip() if first > 1 else ""
        head = _bytes(begin)[: node.col_offset] if first == node.lineno else b""
        after = _bytes(end)[node.end_col_offset or 0 :].strip()
        return not head.strip() and not before.endswith("\\") and (not after or after.startswith(b"#"))

    def source(self, node: ast.AST) -> str:
        """The node as it is written, without comments around it."""
        span = self.span(node)
        lines = list(self.lines[span.line - 1 : span.end_line])
        lines[-1] = lines[-1][: span.end_column - 1]
        lines[0] = lines[0][span.column - 1 :]
        return "\n".join(lines)


class Parents(Mapping[ast.AST, ast.AST]):
    """The node around each node, computed for the top-level statements that somebody asks about."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._places = Places(tree)
        self._looked_at: set[ast.stmt] = set()
        self._known: dict[ast.AST, ast.AST] = dict.fromkeys(tree.body, tree)

    def __getitem__(self, node: ast.AST) -> ast.AST:
        if node not in self._known and node is not self._tree:
            self._look_for(node)
        return self._known[node]

    def _look_for(self, node: ast.AST) -> None:
        line = getattr(node, "lineno", None)
        for statement in self._tree.body if line is None else self._places.covering(line):
            if statement not in self._looked_at:
                self._looked_at.add(statement)
                for each in _walk(statement):
                    self._known.update((child, each) for child in ast.iter_child_nodes(each))

    def __iter__(self) -> Iterator[ast.AST]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Places:
    """Which top-level statements cover a line, decorators included."""

    def __init__(self, tree: ast.Module) -> None:
        self._statements = tree.body
        self._firsts = [_first_line(statement) for statement in tree.body]

    def covering(self, line: int) -> Iterator[ast.stmt]:
        """They come in order of lines and do not overlap, but several may share one (`a(); b()`)."""
        for index in range(bisect_right(self._firsts, line) - 1, -1, -1):
            statement = self._statements[index]
            if (statement.end_lineno or statement.lineno) < line:
                return
            yield statement


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def _walk(root: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, several times as fast."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        for value in node.__dict__.values():
            if isinstance(value, ast.AST):
                waiting.append(value)
            elif isinstance(value, list):
                waiting.extend(item for item in value if isinstance(item, ast.AST))


class Sources:
    """The files of one audit, parsed when a fix asks for them; the same tree for all fixes of a file."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._parsed: dict[str, Parsed | None] = {}

    def parsed(self, path: str) -> Parsed | None:
        """The file and its tree; None if it cannot be read or parsed."""
        if path not in self._parsed:
            self._parsed[path] = self._parse(path)
        return self._parsed[path]

    def text(self, path: str) -> str:
        """The file's text; empty if it cannot be read."""
        try:
            return self._texts.text(path)
        except (Unreadable, KeyError):
            return ""

    def _parse(self, path: str) -> Parsed | None:
        try:
            text = self._texts.text(path)
        except (Unreadable, KeyError):
            return None
        lines = self._texts.lines(path)
        try:
            return Parsed(path, text, lines, _tree(text), frozenset())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            older = in_older_syntax(text)
        if older is None:
            return None
        told = lines_of(older)
        pairs = enumerate(zip(lines, told, strict=False), start=1)
        moved = frozenset(number for number, (new, old) in pairs if new != old)
        return Parsed(path, text, lines, _tree(older), moved, told)


def _bytes(line: str) -> bytes:
    """What the columns of a tree count."""
    return line.encode(errors="surrogatepass")


def _tree(text: str) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # of odd escapes; the code is not ours
        return ast.parse(text, type_comments=False)


@dataclass(frozen=True)
class Case:
    """One finding to be repaired."""

    finding: Finding
    facts: Facts
    sources: Sources

    @property
    def file(self) -> Parsed | None:
        """The file that the finding is in."""
        return self.sources.parsed(self.finding.span.path)

    @cached_property
    def lease(self) -> Lease | None:
        """The acquire that the finding is about, for rules about single leases."""
        span, symbol = self.finding.span, self.finding.symbol
        leases = self.facts.leases
        first = bisect_left(leases, span, key=lambda lease: lease.span)  # they are sorted by it
        here = takewhile(lambda lease: lease.span == span, islice(leases, first, None))
        return next((lease for lease in here if lease.symbol == symbol), None)
