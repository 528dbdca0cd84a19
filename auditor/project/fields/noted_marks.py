"""Containers of an object in which one of its methods notes what it has marked, as it is, in a list or in a
record: `cache.pin(key)`, and `self.pinned.append(key)`; `node.hold()`, and `self.held[rid] = (rid, node)`."""

import ast
from collections.abc import Iterator

from auditor.ir.ops import ANY_ITEM, Path
from auditor.project.code.bindings import given_to, names_bound
from auditor.project.code.modules import Function
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk


def places_noting(outcome: Outcome) -> Iterator[Path]:
    """Where in the containers the marked thing lies then."""
    own = outcome.function.owner
    if not outcome.acquisition.keyed or own is None or _is_bound_again(outcome):
        return
    for node, path in outcome.noted:
        if path[0] == own and ANY_ITEM in path and not _is_once_for_many(outcome, node):
            yield path


def _is_once_for_many(outcome: Outcome, node: int) -> bool:
    """`if key not in self.stamp: cache.pin(key)`, and behind that each time `self.heap.append(key)`."""
    note = outcome.function.graph.ops[node].at
    return any(
        isinstance(choice, ast.If)
        and _has(choice.body, outcome.call)
        and not _has([choice], note)
        and not isinstance((choice.orelse or choice.body)[-1], ast.Return | ast.Raise | ast.Continue)
        for choice in outcome.function.statements
    )


def _has(body: list[ast.stmt], wanted: ast.AST) -> bool:
    return any(node is wanted for statement in body for node in walk(statement))


def _is_bound_again(outcome: Outcome) -> bool:
    """By one loop, and by another statement after it: what is noted there is another one."""
    marked = {place[0] for place in outcome.acquisition.places}
    bound = [marked & set(names_bound(node)) for node in outcome.function.statements]
    return sum(map(bool, bound)) > 1


def lists_entries(method: Function, table: str) -> bool:
    """`late = [each for each in self.visits.values() if each.late]`, and `return late`."""
    returned = (each.value for each in method.statements if isinstance(each, ast.Return))
    given = (value for each in returned if isinstance(each, ast.Name) for value in given_to(method, each.id))
    return any(
        isinstance(value, ast.ListComp) and any(getattr(node, "attr", "") == table for node in walk(value))
        for value in given
    )
