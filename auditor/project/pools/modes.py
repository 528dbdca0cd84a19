"""Locks that are held in several modes, each of which has an end of its own.

    lock.acquire_read()
    ...
    lock.release_write()

What ends the one does not end the other, where the names go together and nothing else turns one into the
other.
"""

import ast
from collections.abc import Iterator
from typing import TypeGuard

from auditor.flow.effects import Handle
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.pools.halves import Half
from auditor.project.shapes.pool_state import own_parameters

Side = tuple[tuple[Half, ...], tuple[Half, ...]]

INITIAL = "__init__"


def modes(
    acquires: tuple[Half, ...], releases: tuple[Half, ...], functions: list[Function]
) -> Iterator[tuple[str, Side]]:
    """The halves of each mode by its name; all of them under no name where there is one mode."""
    named = {affix for half in acquires for affix in half.name.affix}
    sides = {
        name: (
            tuple(half for half in acquires if half.name.affix == {name}),
            tuple(half for half in releases if half.name.affix == {name}),
        )
        for name in sorted(named)
    }
    apart = len(sides) > 1 and all(got and given for got, given in sides.values())
    counted = sum(len(got) + len(given) for got, given in sides.values())
    halves = (*acquires, *releases)
    if (
        not apart
        or counted != len(halves)
        or any(half.handle is not Handle.RECEIVER for half in acquires)
        or any(own_parameters(half.function) for half in releases)
        or _are_turned([half.function for half in halves], functions)
    ):
        yield "", (acquires, releases)
        return
    yield from sides.items()


def _are_turned(halves: list[Function], functions: list[Function]) -> bool:
    """`downgrade()` lowers what `acquire_write` has set."""
    state = set().union(*map(_changed, halves))
    others = (each for each in functions if each not in halves and each.name != INITIAL)
    return any(not state.isdisjoint(_changed(each)) for each in others)


def _changed(function: Function) -> set[str]:
    changed = (own_attribute(node, function.owner or "") for node in function.nodes if _is_stored(node))
    return {name for name in changed if name is not None}


def _is_stored(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
