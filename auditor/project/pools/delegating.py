"""Pairs that hand on what a pool from elsewhere lends: `get_connection` asks `self._pool.getconn()`, and
`return_connection(conn)` tells `self._pool.putconn(conn)`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.pools.queues import POOL_WORDS
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import (
    ACQUIRE_WORDS,
    RELEASE_WORDS,
    ends,
    pairs_with,
    split,
    take_apart,
    undoes,
)

Asked = tuple[str, ast.Call, str]
"""A field of the method's own object, the call of one of its methods, and that method's name."""


def handing_on(methods: list[Function]) -> Iterator[tuple[Function, Function]]:
    """Methods of which one undoes another by name, and hands to the same what the other got there."""
    for one in methods:
        for other in methods:
            if undoes(other.name, one.name) and hands_on(one, [other]):
                yield one, other


def hands_on(function: Function, partners: list[Function]) -> bool:
    """It asks a pool in a field for what its partners tell the same field's method of the other half."""
    return any(
        _is_pair(field, taking, giving)
        for field, asked, taking in _asked(function)
        if _is_returned(asked, function)
        for partner in partners
        for other, call, giving in _asked(partner)
        if other == field and _is_told_of(call, partner) and not _told_both(call, function)
    )


def _asked(function: Function) -> Iterator[Asked]:
    owner = function.owner
    for call in function.calls if owner is not None else ():
        match call.func:
            case ast.Attribute(value=ast.Attribute() as field, attr=name) if owner is not None:
                held = own_attribute(field, owner)
                if held is not None:
                    yield held, call, name


def _is_pair(field: str, taking: str, giving: str) -> bool:
    """`get` and `put` alone are a store's as well as a pool's."""
    if undo_in_one_word(giving, taking):
        return True
    acquiring, releasing = take_apart(taking, ACQUIRE_WORDS), take_apart(giving, RELEASE_WORDS)
    if acquiring is None or releasing is None or not pairs_with(acquiring, releasing):
        return False
    if acquiring.affix != releasing.affix:
        return False  # `get_free_size()` is not what `free(block)` ends
    plain = acquiring.verb in ("get", "take", "fetch", "pop") and not acquiring.affix
    return not plain or not POOL_WORDS.isdisjoint(split(field))


def undo_in_one_word(giving: str, taking: str) -> bool:
    """`ncclCommRegister` and `ncclCommDeregister`, `cudaMalloc` and `cudaFree`: the rest says of what."""
    pairs = list(zip(split(giving), split(taking), strict=False))
    other = [(one, another) for one, another in pairs if one != another]
    same_length = len(split(giving)) == len(split(taking)) == len(pairs)
    return same_length and len(pairs) > 1 and len(other) == 1 and ends(*other[0])


def _is_told_of(call: ast.Call, function: Function) -> bool:
    given = own_parameters(function)
    return bool(call.args) and isinstance(call.args[0], ast.Name) and call.args[0].id in given


def _told_both(call: ast.Call, function: Function) -> bool:
    """`consume(tag)` and `cancel(tag)`: the caller has chosen what the other half is told."""
    return getattr(call.args[0], "id", "") in own_parameters(function)


def _is_returned(call: ast.Call, function: Function) -> bool:
    """Itself, or under a name: a sum of what it asks for is no lease."""
    statements = list(function.statements)
    names = {
        target.id
        for each in statements
        if isinstance(each, ast.Assign) and (each.value is call or _awaits(each.value, call))
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    returned = (each.value for each in statements if isinstance(each, ast.Return))
    return any(
        value is call or _awaits(value, call) or (isinstance(value, ast.Name) and value.id in names)
        for value in returned
    )


def _awaits(value: ast.expr | None, call: ast.Call) -> bool:
    return isinstance(value, ast.Await) and value.value is call
