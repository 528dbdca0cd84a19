"""Loops that end before the list of leases does: `zip(slots, kept)`, where `slots` are one for each of
`lines` and `kept` are those lines that a test has chosen."""

import ast
from collections.abc import Iterator

from auditor.flow.lists import PUTTING_IN
from auditor.ir.graph import Graph
from auditor.ir.ops import Assume, Call, Constant, EndStatement, InPlace, Move, Next, Store
from auditor.source.nodes import walk


class Fewer:
    """Of the leases that the call `acquire` returns, or that are acquired by it in one go."""

    def __init__(self, graph: Graph, acquire: ast.Call) -> None:
        self.graph = graph
        self.acquire = acquire

    def ends_early(self, loop: Next) -> bool:
        """Whether it takes the leases side by side with others, which are fewer."""
        zipped = self._zipped(loop)
        if zipped is None or zipped.kwargs:
            return False  # `strict=True` says that both are as long
        names = [given.id for given in zipped.at.args if isinstance(given, ast.Name)]
        return any(self._is_one_for_each(name) and self._has_fewer(names, name) for name in names)

    def _has_fewer(self, names: list[str], held: str) -> bool:
        wholes = self._told(held)
        others = [name for name in names if name != held and name not in wholes]
        return any(self._chosen_from(name) in wholes and not self._compared(held, name) for name in others)

    def _zipped(self, loop: Next) -> Call | None:
        made = {loop.source}
        made |= {op.source for op in self.graph.ops if isinstance(op, Move) and op.target == loop.source}
        for op in self.graph.ops:
            if isinstance(op, Call) and op.method == "zip" and op.receiver is None and op.target in made:
                return op
        return None

    def _is_one_for_each(self, name: str) -> bool:
        """`admit([line.size for line in lines])`, `[take() for _ in lines]`; not of some that a test has
        chosen there as well."""
        values = self._values(name)
        within = len(values) == 1 and any(inner is self.acquire for inner in walk(values[0]))
        return within and not any(map(_is_chosen, walk(values[0])))

    def _told(self, name: str) -> set[str]:
        """The lists that the leases are as many as."""
        return {
            inner.id for value in self._values(name) for inner in walk(value) if isinstance(inner, ast.Name)
        }

    def _chosen_from(self, name: str) -> str | None:
        """`lines` of `kept = [line for line in lines if line.strip()]`, to which nothing is added."""
        match self._values(name):
            case [ast.ListComp(generators=[ast.comprehension(iter=ast.Name(id=whole), ifs=[_, *_])])]:
                return None if self._is_put_into(name) else whole
        return None

    def _is_put_into(self, name: str) -> bool:
        for op in self.graph.ops:
            match op:
                case InPlace(target=(str() as root, *_)) | Store(target=(str() as root, *_)) if root == name:
                    return True
                case Call(receiver=(str() as root,), method=method) if root == name and method in PUTTING_IN:
                    return True
        return False

    def _compared(self, one: str, other: str) -> bool:
        """`if len(kept) < len(slots): ...` sees to the difference."""
        asked = (op.names for op in self.graph.ops if isinstance(op, Assume))
        return any("len" in names and not names.isdisjoint({one, other}) for names in asked)

    def _values(self, name: str) -> list[ast.expr]:
        return list(_assigned(self.graph, name))


def _is_chosen(node: ast.AST) -> bool:
    return isinstance(node, ast.comprehension) and bool(node.ifs)


def _assigned(graph: Graph, name: str) -> Iterator[ast.expr]:
    for op in graph.ops:
        match op:
            case (
                EndStatement(at=ast.Assign(targets=[ast.Name(id=target)], value=value))
                | Constant(at=ast.Assign(targets=[ast.Name(id=target)], value=value))
            ) if target == name:
                yield value
