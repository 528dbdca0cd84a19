"""Requests that a method fills with a lease and refuses all the same.

`req.slot = self.slots.take()`, then `return False` on one way and `self.running[req.rid] = req; return True`
on another: what ends the leases of requests goes over `self.running`, and this one is not there. Where a
caller has the request from a table or a list, that may be gone over, too, and nothing is said; unless he ends
those, and no others, that he was told yes about: `if self.admit(req): self.retire(req)`."""

import ast
from collections.abc import Iterator

from auditor.flow.follow import Followed
from auditor.flow.held import Held
from auditor.ir.ops import ANY_ITEM, Leave, Path, Way
from auditor.project.code.answers import NOTHING
from auditor.project.code.bindings import given_to
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

WayOut = tuple[int, Held]


def refused_with_it(
    model: ClassModel, function: Function, followed: Followed, ending: frozenset[str]
) -> list[WayOut]:
    """The ways out that say that nothing came of it, with the lease in a field of what it was told."""
    if function.cls is None or function.owner is None:
        return []
    ways = [
        (node, held) for node in followed.endings.stored for held in followed.solution.states.get(node, ())
    ]
    entered = [node for node, held in ways if _is_entered(function, held)]
    answers = {_answer(function, node) for node in entered}
    calls = list(_calls(model, function))
    if answers and answers.isdisjoint({*NOTHING, ""}):
        unended = all(_is_new_there(*call) for call in calls)
    else:
        kept = {_answer(function, node) for node, _ in ways} - {*NOTHING, ""}
        unended = bool(kept and calls) and all(_ends_those_alone(function, *call, ending) for call in calls)
    return [
        (node, held)
        for node, held in ways
        if unended and node not in entered and _answer(function, node) in NOTHING
        if (place := _in_what_it_is_told(function, held)) is not None
        if _is_ended_by_its_class(function, place[1][1:], ending) and not _is_known(function, place[0])
    ]


def _answer(function: Function, node: int) -> str:
    op = function.graph.ops[node]
    if not isinstance(op, Leave) or op.way is not Way.RETURN:
        return ""
    value = getattr(op.at, "value", None)
    return ast.unparse(value) if isinstance(value, ast.expr) else "None"


def _is_entered(function: Function, held: Held) -> bool:
    """`self.running[req.rid]` holds it as well."""
    return any(place[0] == function.owner and ANY_ITEM in place for place in held.places)


def _in_what_it_is_told(function: Function, held: Held) -> Path | None:
    """`req.slot`, and nowhere else but in its own names."""
    told = set(function.parameters[1:])
    outside = [place for place in sorted(held.places) if place[0] in told or place[0] == function.owner]
    match outside:
        case [(_, field) as place] if place[0] in told and field.startswith("."):
            return place
    return None


def _is_ended_by_its_class(function: Function, field: str, ending: frozenset[str]) -> bool:
    return any(field in fields for fields in _ended_by_its_class(function, ending).values())


def _ended_by_its_class(function: Function, ending: frozenset[str]) -> dict[str, set[str]]:
    """Its other methods with the fields of what they are told, or find, that they end."""
    methods = function.cls.methods.values() if function.cls is not None else ()
    return {
        method.name: {
            argument.attr
            for call in method.calls
            if last_name(call) in ending
            for argument in call.args
            if isinstance(argument, ast.Attribute)
        }
        for method in methods
        if method is not function
    }


def _is_known(function: Function, name: str) -> bool:
    """`self.waiting.remove(req)`, `req in self.waiting`: it comes from there."""
    for node in function.nodes:
        match node:
            case ast.Compare(left=ast.Name(id=asked), ops=[ast.In() | ast.NotIn()]) if asked == name:
                return True
            case ast.Call(func=ast.Attribute(attr="remove" | "discard"), args=[ast.Name(id=told)]):
                if told == name:
                    return True
    return False


def _calls(model: ClassModel, function: Function) -> Iterator[tuple[Function, ast.Call]]:
    for path in model.project.calling(function.name):
        module = model.project.module(path)
        for caller in module.by_node.values() if module is not None else ():
            yield from ((caller, call) for call in caller.calls if last_name(call) == function.name)


def _is_new_there(caller: Function, call: ast.Call) -> bool:
    """The caller was told of it, or has made it, and does nothing about a refusal."""
    told = [each for each in call.args if isinstance(each, ast.Name)]
    asks = any(
        isinstance(node, ast.If | ast.While) and any(each is call for each in walk(node.test))
        for node in caller.statements
    )
    made = (
        each.id in caller.parameters
        or any(isinstance(value, ast.Call) and _is_class(value) for value in given_to(caller, each.id))
        for each in told
    )
    return bool(told) and len(told) == len(call.args) and all(made) and not asks


def _ends_those_alone(function: Function, caller: Function, call: ast.Call, ending: frozenset[str]) -> bool:
    """`if self.admit(req): self.run(req); self.retire(req)`, and nothing where the answer was no."""
    told = [each.id for each in call.args if isinstance(each, ast.Name)]
    enders = {name for name, fields in _ended_by_its_class(function, ending).items() if fields}
    ends = [
        each
        for each in caller.calls
        if last_name(each) in enders and [ast.unparse(given) for given in each.args] == told
    ]
    choices = (node for node in caller.statements if isinstance(node, ast.If) and node.test is call)
    return bool(ends) and any(
        not choice.orelse and {id(node) for each in choice.body for node in walk(each)} >= {*map(id, ends)}
        for choice in choices
    )


def _is_class(made: ast.Call) -> bool:
    return last_name(made)[:1].isupper()
