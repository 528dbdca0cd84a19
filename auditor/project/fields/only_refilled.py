"""Fields of which the only end stands before the next filling: `self.pool.free(request.draft)`, and then
`request.draft = self.pool.take()`, so that the last one stays."""

import ast
from collections.abc import Sequence, Set

from auditor.ir.ops import Path
from auditor.project.code.bindings import is_dropped, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING
from auditor.project.fields.exits import CHOOSING
from auditor.project.fields.forgetting import CLOSING
from auditor.project.fields.in_others import Uses
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def fills_always(filling: Function, call: ast.Call, place: Path) -> bool:
    """Whoever calls the function and has the last one ended has a new one there, unless it raises."""
    body = filling.node.body if isinstance(filling.node.body, list) else []
    reads = reads_of(filling, place[0], place[1][1:])
    given = (each for each in filling.calls if any(id(argument) in reads for argument in each.args))
    ended = min((each.lineno for each in given), default=call.lineno)
    for statement in body:
        parts = list(walk(statement))
        if any(part is call for part in parts):
            choices = (part for part in parts if isinstance(part, CHOOSING))
            return not any(inner is call for choice in choices for inner in walk(choice))
        if any(isinstance(part, ast.Return) and part.lineno >= ended for part in parts):
            return False
    return False


def only_for_the_next(
    released_by: Sequence[str], family: Sequence[Function], filling: Function, call: ast.Call, place: Path
) -> bool:
    """The function that fills the field, and those that call it and work with what is there, are all that
    give back what the field holds."""
    if not released_by or not fills_always(filling, call, place):
        return False
    field = place[1][1:]
    enders = [each for each in family if each.qualname in released_by and each is not filling]
    return {*released_by} <= {filling.qualname, *(each.qualname for each in enders)} and all(
        any(last_name(its) == filling.name for its in each.calls) and Uses(each).only_works(field)
        for each in enders
    )


def ends_for_good(enders: Sequence[Function], family: Sequence[Function]) -> bool:
    """`finish` gives back other fields, by itself or by a method that it calls; `truncate` does so to an
    object that goes on, and so may keep this one."""
    names = {ender.name for ender in enders}
    return any(
        ENDING.search(each.name) is not None
        and (each in enders or any(last_name(call) in names for call in each.calls))
        for each in (*family, *enders)
    )


def reads_before(filling: Function, place: Path, call: ast.Call) -> Set[int]:
    """Where the function speaks of the field before it asks for the next one."""
    body = filling.node.body if isinstance(filling.node.body, list) else []
    earlier = (each for each in body if (each.end_lineno or each.lineno) < call.lineno)
    inside = {id(part) for each in earlier for part in walk(each)}
    return reads_of(filling, place[0], place[1][1:]) & inside


def reads_of(function: Function, owner: str, field: str) -> Set[int]:
    return {
        id(node)
        for node in function.nodes
        if isinstance(node, ast.Attribute) and node.attr == field and getattr(node.value, "id", "") == owner
    }


def closes_without(
    family: Sequence[Function], filling: Function, call: ast.Call, field: str, ends: Set[str]
) -> Function | None:
    """`shutdown`, which gives back to the same pool what stands in another field, and never comes to speak of
    this one. Nor does it do anything else to the pool, `self.agent.close()`, which may end all."""
    pool = getattr(call.func, "value", None)
    if not isinstance(pool, ast.Attribute):
        return None
    for method in family:
        if CLOSING.fullmatch(method.name) and not method.is_abstract and method is not filling:
            asked = [each for each in method.calls if _is_on(each, pool, filling, method)]
            other = [each for each in asked if _gives_another(each, method, field)]
            silent = other and all(last_name(each) in ends or _ends_one(each, method) for each in asked)
            if silent and not _comes_to(method, family, field, set()) and not _gives_itself(method):
                return method
    return None


def _ends_one(call: ast.Call, method: Function) -> bool:
    """`self.agent.remove(peer)`, or `self.agent.peers()`, of which something is asked: neither ends all."""
    return bool(call.args) or not is_dropped(method, call)


def _is_on(call: ast.Call, pool: ast.Attribute, filling: Function, method: Function) -> bool:
    """`self.agent.deregister(...)`, where `self.agent` lent it."""
    of = getattr(call.func, "value", None)
    name = own_attribute(pool, filling.owner or "")
    return (
        name is not None and isinstance(of, ast.Attribute) and own_attribute(of, method.owner or "") == name
    )


def _gives_another(call: ast.Call, method: Function, field: str) -> bool:
    given = {own_attribute(argument, method.owner or "") for argument in call.args}
    return bool(given - {None, field})


def _comes_to(method: Function, family: Sequence[Function], field: str, seen: set[Function]) -> bool:
    """It names the field, or a method of the family that it speaks of does."""
    seen.add(method)
    if any(field in (getattr(node, "attr", ""), getattr(node, "value", "")) for node in method.nodes):
        return True
    named = {getattr(node, "attr", "") for node in method.nodes}
    return any(
        _comes_to(each, family, field, seen) for each in family if each.name in named and each not in seen
    )


def _gives_itself(method: Function) -> bool:
    """`registry.drop(self)`, `vars(self)`: what is told of the object may find the field there."""
    return any(
        isinstance(argument, ast.Name) and argument.id == method.owner
        for call in method.calls
        for argument in (*call.args, *(keyword.value for keyword in call.keywords))
    )
