"""Raw allocations that a pooled class makes on purpose: where there is no pool, or it is not worth asking."""

import ast
import re
from collections.abc import Iterator

from auditor.model import Span
from auditor.source.entries import Source
from auditor.source.pool_use import ACQUIRE, LEASE, Function, pool_method

_ASKS = re.compile(
    r"(?i)pool|threshold|arena|workspace|numel|nbytes|bytes|compil|trac|script|captur|grad|training"
)
"""What a condition is about when the branch that it guards may do without the pool."""


def fallbacks(methods: dict[str, Function], allocations: set[Span], source: Source) -> Iterator[Span]:
    """Those of `allocations` that stand beside the pool, and not in its place."""
    for name, method in methods.items():
        allocates = bool(ACQUIRE.match(name) or LEASE.match(name))
        pooled = _pooled_names(method)
        for node, around in _calls(method):
            span = source.span(node)
            if span in allocations and (allocates or _stands_beside(node, around, pooled)):
                yield span


def _calls(method: Function) -> Iterator[tuple[ast.Call, tuple[ast.AST, ...]]]:
    """Every call with what encloses it, innermost last."""
    waiting: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(method, ())]
    while waiting:
        node, around = waiting.pop()
        if isinstance(node, ast.Call):
            yield node, around
        waiting += [(child, (*around, node)) for child in ast.iter_child_nodes(node)]


def _stands_beside(node: ast.Call, around: tuple[ast.AST, ...], pooled: set[str]) -> bool:
    for each in around:
        match each:
            case ast.If(test=test) | ast.IfExp(test=test) if _ASKS.search(ast.unparse(test)) or _takes(each):
                return True
            case ast.Try() | ast.ExceptHandler() if _takes(each):
                return True
            case ast.Assign(targets=[ast.Name(id=name)]) if name in pooled:
                return True
            case ast.BoolOp() if _takes(each):
                return True
    return False


def _takes(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) and _is_acquire(each) for each in ast.walk(node))


def _is_acquire(call: ast.Call) -> bool:
    name = pool_method(call) or ""
    return bool(ACQUIRE.match(name) or LEASE.match(name))


def _pooled_names(method: Function) -> set[str]:
    """Names that some branch of the method binds to what the pool gave."""
    return {
        target.id
        for node in ast.walk(method)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_acquire(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
