"""Conditions of an exit method that are about the exception it is told of, and about nothing else."""

import ast
from collections.abc import Iterator, Set

from auditor.ir.scope import parameters_of
from auditor.project.code.entered import EXITS
from auditor.project.code.modules import Function
from auditor.source.nodes import walk

READING = frozenset({"len", "bool", "any", "all", "getattr", "isinstance", "issubclass"})


def is_of_the_exception(test: ast.expr, method: Function, beside: Set[str] = frozenset()) -> bool:
    """`kind is not None` of `__exit__(self, kind, error, trace)`, `issubclass(kind, sqlite3.Error)`."""
    told = set(parameters_of(method.node)[1:]) if method.name in EXITS else set()
    names = names_in(test)
    sorts = {
        node.id
        for call in walk(test)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("issubclass", "isinstance")
        for each in call.args[1:]
        for node in walk(each)
        if isinstance(node, ast.Name)
    } | set(_sorts_compared_with(test))
    return bool(names & told) and names - sorts <= told | beside


def _sorts_compared_with(test: ast.expr) -> Iterator[str]:
    """`asyncio` of `kind is asyncio.TimeoutError`, `KeyError` of `kind in (KeyError, OSError)`."""
    for compared in walk(test):
        for side in compared.comparators if isinstance(compared, ast.Compare) else ():
            for sort in side.elts if isinstance(side, ast.Tuple) else [side]:
                spelt = ast.unparse(sort).split(".")
                if isinstance(sort, ast.Name | ast.Attribute) and spelt[-1][:1].isupper():
                    yield spelt[0]


def names_in(test: ast.expr) -> set[str]:
    return {node.id for node in walk(test) if isinstance(node, ast.Name)} - READING
