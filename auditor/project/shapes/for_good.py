"""Whether a method takes out of a store for good, or puts back what it hands out."""

import ast
from collections.abc import Iterator, Set

from auditor.project.shapes.field_work import FieldWork, Put
from auditor.project.shapes.name_bindings import mentions
from auditor.project.shapes.own_helpers import Works, all_put
from auditor.project.shapes.pieces import is_cut
from auditor.source.nodes import walk


def takes_for_good(work: FieldWork, store: str, works: Works) -> bool:
    """It hands out what it took, and does not put that back: who looks up in a cache of the last used puts
    it to the end."""
    if not any(field == store for field, _ in work.taken):
        return False
    cut = is_cut(work.method, store)
    taken = {
        id(node)
        for field, node in work.taken
        if field == store and (cut or not isinstance(node, ast.Subscript))
    }
    if not taken or not work.hands_out(taken):
        return False
    back = [(put, at) for put, at in all_put(work, works) if put.field == store]
    return not any(
        _is_handed_out(work, put, taken) and not (_given_up(work, at) or _set_aside(work, put))
        for put, at in back
    )


def _is_handed_out(work: FieldWork, put: Put, taken: Set[int]) -> bool:
    """The same that a return mentions. What is computed from it is what is left: `self.holes.add(base +
    size)`."""
    if any(isinstance(each, ast.BinOp) for each in walk(put.value)):
        return False
    same = work.of_one_kind(_returned(work))
    return mentions(put.value, frozenset(), taken) or bool(_meant(work, put) & same)


def _returned(work: FieldWork) -> set[str]:
    return {name for value in work.returned for name in _names(value)}


def _meant(work: FieldWork, put: Put) -> set[str]:
    """What is put back; of what a loop puts back, the list that it goes over."""
    names = set(_names(put.value))
    over = {
        name
        for loop in work.method.nodes
        if isinstance(loop, ast.For) and names & set(_names(loop.target)) and _within(loop, put.value)
        for name in _names(loop.iter)
    }
    return over or names


def _set_aside(work: FieldWork, put: Put) -> bool:
    """`aside` of `if fits(page): break` and `aside.append(page)`: what does not fit."""
    lists = _meant(work, put) - _returned(work)
    filled = [
        call
        for call in work.method.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("append", "add")
        and getattr(call.func.value, "id", "") in lists
    ]
    return bool(filled) and all(_given_up(work, call) for call in filled)


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in walk(node) if isinstance(each, ast.Name))


def _within(loop: ast.AST, node: ast.AST) -> bool:
    return any(each is node for each in walk(loop))


def _given_up(work: FieldWork, at: ast.AST) -> bool:
    """The block in which it is put back hands nothing out: it ends in a raise, a `return None`, a
    `return []`, a `continue`; or it is a turn of a loop that was left before by who hands it out."""
    bodies = (
        (node, body)
        for node in work.method.nodes
        for body in (getattr(node, "body", ()), getattr(node, "orelse", ()))
        if isinstance(body, list) and body
    )
    return any(
        (_hands_out_nothing(body[-1]) or (isinstance(node, ast.For | ast.While) and _left_before(body, at)))
        and any(_within(each, at) for each in body)
        for node, body in bodies
    )


def _left_before(turn: list[ast.stmt], at: ast.AST) -> bool:
    """`if fits(page): return page` above, or `found = page` and `break`."""
    for statement in turn:
        if _within(statement, at):
            return False
        last = statement.body[-1] if isinstance(statement, ast.If) else statement
        if isinstance(last, ast.Return | ast.Break) and not _hands_out_nothing(last):
            return True
    return False


def _hands_out_nothing(last: ast.stmt) -> bool:
    match last:
        case ast.Raise() | ast.Continue() | ast.Return(value=None | ast.Constant()):
            return True
        case ast.Return(value=ast.List(elts=[]) | ast.Tuple(elts=[])):
            return True
    return False
