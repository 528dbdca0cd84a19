"""A file while it is rewritten: lines, the syntax tree over them, and replacements by place."""

import ast
import io
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from auditor.source.entries import Source
from auditor.source.load import lines_of
from auditor.source.newer_syntax import in_older_syntax

Node = ast.stmt | ast.expr | ast.arg | ast.keyword | ast.alias
Place = tuple[int, int]
"""A line counted from 1 and a column of characters counted from 0."""


class Refused(Exception):
    """Something cannot be rewritten; the message is the reason, for people."""


@dataclass(frozen=True)
class Draft:
    """One state of a file. Every replacement gives a new draft, parsed again when somebody asks."""

    path: str
    lines: tuple[str, ...]

    @classmethod
    def of(cls, path: str, text: str) -> "Draft":
        """A draft of `text`. Raises Refused if it is not Python."""
        draft = cls(path, tuple(lines_of(text)))
        assert draft.tree
        return draft

    @cached_property
    def _parsed(self) -> tuple[ast.Module, frozenset[int]]:
        text = "\n".join(self.lines)
        try:
            return _tree(text), frozenset()
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            older = in_older_syntax(text)
            if older is None:
                line = getattr(error, "lineno", None)
                where = f"{self.path}:{line}" if line else self.path
                raise Refused(f"{where} is not valid Python: {getattr(error, 'msg', error)}") from error
        pairs = enumerate(zip(self.lines, lines_of(older), strict=False), start=1)
        return _tree(older), frozenset(number for number, (new, old) in pairs if new != old)

    @property
    def tree(self) -> ast.Module:
        return self._parsed[0]

    @property
    def as_source(self) -> Source:
        """The same for those who read files."""
        return Source(self.path, "\n".join(self.lines), self.tree)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def start(self, node: Node) -> Place:
        return self._place(node.lineno, node.col_offset)

    def end(self, node: Node) -> Place:
        return self._place(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _place(self, line: int, offset: int) -> Place:
        """ast counts the bytes of UTF-8."""
        if line in self._parsed[1]:
            raise Refused(f"{self.path}:{line} has syntax that this Python cannot place")
        text = self.lines[line - 1]
        return line, offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))

    def source(self, node: Node) -> str:
        """The node as it is written."""
        return self.between(self.start(node), self.end(node))

    def between(self, start: Place, end: Place) -> str:
        """The text from one place to another."""
        lines = list(self.lines[start[0] - 1 : end[0]])
        lines[-1] = lines[-1][: end[1]]
        lines[0] = lines[0][start[1] :]
        return "\n".join(lines)

    def indent(self, line: int) -> str:
        """The white space that a line begins with."""
        text = self.lines[line - 1]
        return text[: len(text) - len(text.lstrip())]

    def alone(self, node: ast.stmt) -> bool:
        """Whether nothing but a comment shares the statement's lines."""
        start, end = self.start(node), self.end(node)
        before, after = self.lines[start[0] - 1][: start[1]], self.lines[end[0] - 1][end[1] :].strip()
        return not before.strip() and (not after or after.startswith("#"))

    def replaced(self, *changes: tuple[Place, Place, str]) -> "Draft":
        """The draft with the text of each range replaced; the ranges do not overlap."""
        lines = list(self.lines)
        for (line, column), (end_line, end_column), text in sorted(changes, reverse=True):
            head, tail = lines[line - 1][:column], lines[end_line - 1][end_column:]
            lines[line - 1 : end_line] = lines_of(head + text + tail)
        return Draft(self.path, tuple(lines))

    def with_lines(self, before: int, new: Sequence[str]) -> "Draft":
        """The draft with lines put in before the line of that number."""
        return Draft(self.path, (*self.lines[: before - 1], *new, *self.lines[before - 1 :]))

    def inner_lines(self, first: int, last: int) -> set[int]:
        """The lines from first to last that begin inside of a string, and so must not be indented."""
        text = "\n".join(self.lines[first - 1 : last]) + "\n"
        inside: set[int] = set()
        opened: list[int] = []
        for token in _tokens(text):
            kind = tokenize.tok_name[token.type]
            if kind == "STRING":
                inside.update(range(token.start[0] + 1, token.end[0] + 1))
            elif kind in ("FSTRING_START", "TSTRING_START"):
                opened.append(token.start[0])
            elif kind in ("FSTRING_END", "TSTRING_END"):
                inside.update(range(opened.pop() + 1, token.end[0] + 1))
        return {first - 1 + line for line in inside}

    def class_named(self, qualname: str) -> ast.ClassDef:
        """The class of that qualified name. Raises Refused where it has gone or is there twice."""
        found = [node for name, node in _classes(self.tree, "") if name == qualname]
        if len(found) != 1:
            raise Refused(f"`{qualname}` is defined {len(found)} times in {self.path}")
        return found[0]


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    """The tokens of an indented piece of a file; its first line's indentation is no error here."""
    found: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            found.append(token)
    except (tokenize.TokenError, IndentationError) as error:
        if not found or isinstance(error, tokenize.TokenError):
            raise Refused(f"its lines cannot be told apart: {error}") from error
        raise Refused("its indentation is not even") from error
    return found


def _tree(text: str) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # of odd escapes; the code is not ours
        return ast.parse(text)


def _classes(parent: ast.AST, prefix: str) -> list[tuple[str, ast.ClassDef]]:
    found: list[tuple[str, ast.ClassDef]] = []
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, ast.ClassDef):
            found.append((f"{prefix}{child.name}", child))
            found += _classes(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found += _classes(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            found += _classes(child, prefix)
    return found
