"""Leases that somebody brings to an object which a `with` ends, `with Staged(pool, pool.checkout(n)):`, of a
class whose `__exit__` gives back what it was brought on some ways only.

The class is seen as if its `__enter__` had taken the lease itself: what is asked of that is asked of this."""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.flow.lease import StoredField
from auditor.project.code.bindings import assignments, given_to, own_attribute
from auditor.project.code.entered import EXITS
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.fields.filling_again import names_in
from auditor.project.meaning.recognise import Recogniser
from auditor.project.outcome import Outcome

Follow = Callable[[Function, ast.Call], Outcome | None]


def brought_to_contexts(
    outcomes: Iterable[Outcome], recogniser: Recogniser, follow: Follow
) -> dict[int, Outcome]:
    """For each outcome (by id of its call) of a lease that is brought to such an object, that of the
    `__enter__` that would have taken it."""
    found: dict[int, Outcome] = {}
    for outcome in outcomes:
        if outcome.acquisition.handle is not Handle.RESULT or outcome.acquisition.declared:
            continue
        for cls, field in _brought(recogniser, outcome):
            source = recogniser.source(outcome.function, outcome.call)
            method = _taking(cls, field, outcome.call)
            call = next(iter(method.calls))
            if source is None:
                continue
            recogniser.second_hand[call] = source
            if (kept := follow(method, call)) is not None and kept.stored:
                found[id(outcome.call)] = kept
    return found


def told_where_it_was_taken(
    found: Mapping[int, tuple[StoredField, ...]], brought: Mapping[int, Outcome], taken: Mapping[int, Outcome]
) -> dict[int, tuple[StoredField, ...]]:
    """What was found of the objects, by the calls of those who brought the leases."""
    told = {}
    for call, outcome in brought.items():
        fields = (each for each in found.get(id(outcome.call), ()) if each.partly_by and not each.released_by)
        told[call] = tuple(replace(each, at=taken[call].lease.span, escapes=False) for each in fields)
    return {call: fields for call, fields in told.items() if fields}


def _brought(recogniser: Recogniser, outcome: Outcome) -> Iterator[tuple[Class, str]]:
    """The class of the object, and the field that keeps the lease there."""
    function = outcome.function
    names = _names_of(function, outcome.call)
    ends = recogniser.ending_names(outcome.acquisition.protocol)
    if any(last_part(call.func) in ends and names_in(call) & names for call in function.calls):
        return  # who brings it sees to it as well
    for call in function.calls:
        told = _told(call, outcome.call, names)
        if told is None:
            continue
        made = recogniser.calls.targets(function, call)[1]
        if made is None and last_part(call.func) == "cls":
            made = function.cls
        if made is None or EXITS.isdisjoint(made.methods) or not _is_entered(function, call, made):
            continue
        field = _field_of(made, told)
        if field is not None:
            yield made, field


def _names_of(function: Function, call: ast.Call) -> set[str]:
    """A name that stands for nothing else."""
    bound = {
        target.id for target, value in assignments(function) if value is call and isinstance(target, ast.Name)
    }
    return {name for name in bound if len(list(given_to(function, name))) == 1}


def _told(call: ast.Call, lease: ast.Call, names: set[str]) -> int | str | None:
    """As which argument the lease is told."""
    for position, given in enumerate(call.args):
        if given is lease or getattr(given, "id", None) in names:
            return position
    for keyword in call.keywords:
        if keyword.value is lease or getattr(keyword.value, "id", None) in names:
            return keyword.arg
    return None


def _is_entered(function: Function, call: ast.Call, made: Class) -> bool:
    """`with Staged(pool, buf):`, or under a name; what a class makes of itself, `return cls(pool, buf)`, is
    made to be entered, too."""
    names = {
        target.id for target, value in assignments(function) if value is call and isinstance(target, ast.Name)
    }
    entered = (
        item.context_expr
        for node in function.statements
        if isinstance(node, ast.With | ast.AsyncWith)
        for item in node.items
    )
    own = function.cls is made and "classmethod" in function.decorators
    return own or any(each is call or getattr(each, "id", None) in names for each in entered)


def _field_of(cls: Class, told: int | str) -> str | None:
    """In which field the object keeps what it is told there."""
    init = cls.methods.get("__init__")
    names = init.parameters[1:] if init is not None else tuple(_fields_of(cls))
    name = told if isinstance(told, str) else next(iter(names[told : told + 1]), None)
    if init is None:
        return name if name in names else None
    kept = (
        own_attribute(target, init.owner or "")
        for target, value in assignments(init)
        if isinstance(value, ast.Name) and value.id == name
    )
    return next((field for field in kept if field is not None), None)


def _fields_of(cls: Class) -> Iterator[str]:
    """Of a dataclass, in the order in which they are told."""
    for node in cls.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _taking(cls: Class, field: str, call: ast.Call) -> Function:
    """`def __enter__(self): self.field = pool.checkout(n)`, which stands where the lease is taken."""
    value = ast.Call(call.func, call.args, call.keywords)
    target = ast.Attribute(ast.Name("self", ast.Load()), field, ast.Store())
    arguments = ast.arguments([], [ast.arg("self")], None, [], [], None, [])
    entering = ast.FunctionDef("__enter__", arguments, [ast.Assign([target], value)], [])
    for node in (value, target, target.value, entering.body[0], entering):
        ast.copy_location(node, call)
    return Function(cls.module, f"{cls.qualname}.__enter__", entering, cls)
