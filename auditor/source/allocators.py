"""Methods that hand out tensors, with a digest that is equal where their code is."""

import ast
import copy
import hashlib
from collections.abc import Iterator
from contextlib import suppress

from auditor.source.entries import Allocator, Source
from auditor.source.imports import dotted_text
from auditor.source.nodes import is_docstring
from auditor.source.pool_use import ACQUIRE, LEASE, Function, pool_method

_FEWEST = 3  # statements; a method that only hands the call on is no allocator of its own
_FACTORIES = frozenset(
    {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "new_empty", "new_zeros"}
)


def allocators(methods: dict[str, Function], source: Source) -> Iterator[Allocator]:
    """Allocating methods with a body: they make tensors or ask a pool, and decide something on the way."""
    for name, method in methods.items():
        named = ACQUIRE.match(name) or LEASE.match(name)
        if named and _statements(method) >= _FEWEST and any(_makes(each) for each in ast.walk(method)):
            with suppress(RecursionError):  # nested too deeply to be compared: that is no failure of its file
                yield Allocator(name, source.span(method, None), digest(method))


def digest(method: Function) -> str:
    """Of what the method does: no docstring, no annotations, parameters and locals by their order."""
    plain = _Plain().visit(copy.deepcopy(method))
    return hashlib.sha256(ast.dump(plain).encode()).hexdigest()[:16]


def _statements(method: Function) -> int:
    return sum(isinstance(each, ast.stmt) and not is_docstring(each) for each in ast.walk(method)) - 1


def _makes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = (dotted_text(node.func) or "").rpartition(".")[2]
    return name in _FACTORIES or bool(ACQUIRE.match(pool_method(node) or ""))


class _Plain(ast.NodeTransformer):
    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns, node.decorator_list = "", None, []
        for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            each.annotation = None
            self._names[each.arg] = each.arg = f"_{len(self._names)}"
        for statement in ast.walk(node):
            if isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
                self._names.setdefault(statement.id, f"_{len(self._names)}")
        node.body = [each for each in node.body if not is_docstring(each)]
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._names.get(node.id, node.id)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value is not None else ast.Pass()
