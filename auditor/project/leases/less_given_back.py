"""Amounts of which less comes back than was taken: `credits.take(2)` and one `credits.give()`, or a record
that says 1 where `len(items)` were taken and whose end goes by what the record says."""

import ast
from collections.abc import Iterator
from dataclasses import replace

from auditor.flow.effects import Acquisition, Handle, Value
from auditor.flow.lease import Leak, Loss
from auditor.flow.measured_anew import measured_anew
from auditor.project.code.bindings import is_dropped, told_by_position
from auditor.project.code.class_model import ClassModel
from auditor.project.code.kept_as_told import field_told
from auditor.project.code.modules import Class, Function
from auditor.project.leases.another_amount import gives_another_amount
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.leases.noted_otherwise import amount_told, notes_otherwise
from auditor.project.leases.parts_of_amounts import is_a_part, is_left_of_it
from auditor.project.meaning.releases import Releases
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

APART = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.comprehension,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
)
"""What is in there may run more often than what is around it."""


def less_comes_back(
    recogniser: Releases, function: Function, acquire: ast.Call, acquisition: Acquisition
) -> bool:
    """In the function itself, or by what it notes down."""
    taken = amount_told(acquire)
    by_result = acquisition.handle is Handle.RESULT and is_dropped(function, acquire)  # `await gate.enter(2)`
    if acquisition.value is not Value.AMOUNT or taken is None:
        return False
    if not (acquisition.handle is Handle.ARGUMENT or by_result):
        return False
    names = recogniser.ending_names(acquisition.protocol)
    ending = [call for call in function.calls if last_name(call) in names]
    if not ending:
        return _number(taken) is None and (
            _notes_less(recogniser, function, acquire, names)
            or notes_otherwise(recogniser, function, acquire, acquisition.protocol)
        )
    if _is_measured_anew(function, acquire, ending):
        return _is_told_nobody(function, acquire, names)
    given = _given_back(recogniser, function, ending[0])
    less = given is not None and given < (_number(taken) or given + 1)
    if len(ending) != 1 or _owner(ending[0]) != _owner(acquire):
        return False
    if _surrounding(function, ending[0]) != _surrounding(function, acquire):
        return False
    less = less or is_a_part(function, amount_told(ending[0]), taken)
    if less and _stays_here(function, acquire, names):
        return True
    another = gives_another_amount(function, acquire, ending[0]) or is_left_of_it(
        function, amount_told(ending[0]), taken
    )
    return another and _is_told_nobody(function, acquire, names)


def _is_measured_anew(function: Function, acquire: ast.Call, ending: list[ast.Call]) -> bool:
    """`refund(len(text))` of a text that has become shorter since `draw(len(text))`."""
    taken, given = amount_told(acquire), amount_told(ending[0])
    site = next((node for node, op in enumerate(function.graph.ops) if op.at is acquire), -1)
    return (
        len(ending) == 1
        and taken is not None
        and given is not None
        and ast.unparse(taken) == ast.unparse(given)
        and _owner(ending[0]) == _owner(acquire)
        and _surrounding(function, ending[0]) == _surrounding(function, acquire)
        and measured_anew(function.graph, site, given)
    )


def of_an_amount(leak: Leak) -> Leak:
    """`take(len(items))`: what `len` returns is read and forgotten, what was taken is lost later."""
    if leak.loss is not Loss.DISCARDED or not leak.trace:
        return leak
    last = replace(leak.trace[-1], note=LAST_WORDS[Loss.FALL_THROUGH])
    return replace(leak, loss=Loss.FALL_THROUGH, trace=(*leak.trace[:-1], last))


def _given_back(recogniser: Releases, function: Function, end: ast.Call) -> int | None:
    """The number that it is told, in writing or by default."""
    if end.args or end.keywords:
        told = amount_told(end)
        return _number(told) if told is not None else None
    targets = recogniser.calls.targets(function, end)[0]
    defaults = {ast.unparse(default) for target in targets for default in _defaults(target)}
    return int(defaults.pop()) if len(defaults) == 1 and min(defaults).isdecimal() else None


def _defaults(target: Function) -> list[ast.expr]:
    return [] if isinstance(target.node, ast.Module) else target.node.args.defaults


def _surrounding(function: Function, call: ast.Call) -> list[int]:
    """Loops and inner functions around the call."""
    return [
        id(node)
        for node in function.nodes
        if node is not function.node and isinstance(node, APART)
        if any(inner is call for inner in walk(node))
    ]


def _stays_here(function: Function, acquire: ast.Call, names: frozenset[str]) -> bool:
    """And no other method of the object gives back."""
    own = _owner(acquire).split(".")[0] == function.owner
    others = () if not own or function.cls is None else function.cls.methods.values()
    return _is_told_nobody(function, acquire, names) and not any(
        last_name(call) in names for each in others if each is not function for call in each.calls
    )


def _is_told_nobody(function: Function, acquire: ast.Call, names: frozenset[str]) -> bool:
    """Neither of the pool nor of how to give back: `spawn(job, done=credits.give)`."""
    owner, ends = _owner(acquire), {id(call.func) for call in function.calls if last_name(call) in names}
    given = [each for call in function.calls for each in (*call.args, *(k.value for k in call.keywords))]
    return not any(ast.unparse(each) in (owner, function.owner) for each in given) and not any(
        getattr(node, "attr", "") in names and id(node) not in ends for node in function.nodes
    )


def _notes_less(recogniser: Releases, function: Function, acquire: ast.Call, names: frozenset[str]) -> bool:
    """`InFlight(items, 1)` after `take(len(items))`, and all who give back say `record.cost`."""
    model = recogniser.calls.model
    fields = {*_fields_given_back(function, acquire, names)}
    field = min(fields) if len(fields) == 1 else None
    for made in function.calls if field else ():
        record = model.callee(function, made.func)
        told = dict(told_by_position(made)) if isinstance(record, Class) else {}
        noted = [value for at, value in told.items() if _kept(model, record, at) == field]
        if any(_number(value) is not None for value in noted):
            taken = amount_told(acquire)
            return not any(taken and ast.unparse(taken) == ast.unparse(other) for other in told.values())
    return False


def _kept(model: ClassModel, record: object, position: int | str) -> str:
    """The field of this argument, which goes by its parameter's name."""
    assert isinstance(record, Class)
    init = model.method(record, "__init__")
    if init is None or isinstance(position, str):
        return field_told(model, record, position)[1:]
    return next(iter(init.parameters[position + 1 : position + 2]), "")


def _fields_given_back(function: Function, acquire: ast.Call, names: frozenset[str]) -> Iterator[str]:
    """What of an object says how much comes back, where it is not what the same function has taken; nothing
    where something else says so as well."""
    taking = last_name(acquire)
    for each in function.module.by_node.values():
        if each.qualname == "<module>" or any(last_name(call) == taking for call in each.calls):
            continue
        for call in each.calls:
            if last_name(call) in names:
                match amount_told(call):
                    case ast.Attribute(value=of, attr=field) if getattr(of, "id", "") != each.owner:
                        yield field
                    case _:
                        yield ""


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _number(node: ast.expr) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None
