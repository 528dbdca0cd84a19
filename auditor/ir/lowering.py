"""What every part of the lowering shares: the builder it grows, the names of the function, and each other."""

import ast
from abc import ABC, abstractmethod

from auditor.ir.builder import Builder, End
from auditor.ir.conditions import Condition
from auditor.ir.ops import EndStatement, Fresh, Path
from auditor.ir.scope import Scope
from auditor.ir.tables import copied_table

Branches = tuple[list[End], list[End]]
"""The ends on which a test is true, and those on which it is false."""


class Lowering(ABC):
    """Lowers one function into a builder; each class that derives from it adds one kind of syntax."""

    def __init__(self, builder: Builder, scope: Scope) -> None:
        self.builder = builder
        self.scope = scope
        self.graph = builder.graph
        self._renamed: list[dict[str, str]] = []
        self._comprehensions = 0
        self.looked_at: dict[int, str] = {}  # calls that take out what a name has already
        self.tables: frozenset[Path] = frozenset()  # dicts: who goes over one gets keys
        self.key_lists: dict[str, ast.expr] = {}  # names of copies, and of what
        self.began_as: frozenset[tuple[str, str]] = frozenset()  # names, and others that they begin as

    def root(self, name: str) -> str:
        for names in reversed(self._renamed):
            if name in names:
                return names[name]
        return self.scope.root(name)

    def copied(self, source: Path) -> Path:
        """What a list is made of: of a table its keys, which are none of what it holds."""
        return self.builder.temporary() if source in self.tables else source

    def table_behind(self, over: ast.expr) -> Path | None:
        """`self.seats` of `self.seats`, `list(self.seats)`, and of a name for such a list."""
        over = self.key_lists.get(over.id, over) if isinstance(over, ast.Name) else over
        over = copied_table(over) or over
        match over:
            case ast.Name(id=name):
                path: Path = (self.root(name),)
            case ast.Attribute(value=ast.Name(id=name), attr=field):
                path = (self.root(name), f".{field}")
            case _:
                return None
        return path if path in self.tables else None

    def value(self, node: ast.expr) -> Path:
        method = getattr(self, f"value_{type(node).__name__}", None)
        result: Path = method(node) if method is not None else self._opaque(node)
        return result

    def _opaque(self, node: ast.AST) -> Path:
        """An expression whose value is none of its parts."""
        uses = tuple(self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        target = self.builder.temporary()
        self.builder.emit(Fresh(node, target, uses))
        return target

    def _end(self, node: ast.AST) -> None:
        """A statement is over: its intermediate values die."""
        if self.builder.reachable:
            self.builder.emit(EndStatement(node))

    @abstractmethod
    def branch(self, test: ast.expr) -> Branches:
        """Lower a test for its outcome."""

    @abstractmethod
    def assumed(self, node: ast.expr, asked: Condition, truth: bool) -> None:
        """What a branch says beyond its own test."""

    @abstractmethod
    def assign(self, target: ast.expr, source: Path) -> None:
        """`target = source`, whatever the target looks like."""

    @abstractmethod
    def body(self, statements: list[ast.stmt]) -> None:
        """Statements one after the other, as far as they can be reached."""
