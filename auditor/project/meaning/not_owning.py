"""Objects told at birth that what they are given is not theirs: `Handle(pool, slot, owned=False)`. Some tell
themselves: `self.owns = slot is None` says that what somebody gave is his.

All that ends the lease in such a class asks for a field first (`if self.owned:`, `if self.pool:`), and this
object has the constant there that says no."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Fate, Value
from auditor.ir.ops import Path
from auditor.project.code.bindings import assignments
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Class, Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.meaning.needs import Question
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.records_told import Constants, fields_set, fields_told
from auditor.project.meaning.summaries import Summaries
from auditor.source.nodes import walk

BEGINNING = ("__init__", "__enter__", "__aenter__")
"""Methods whose counterpart is asked instead."""


def is_not_owned(
    recogniser: Recogniser, summaries: Summaries, cls: Class, call: ast.Call, kept: Path,
    value: Value, protocol: str,
) -> bool:  # fmt: skip
    """Whether methods of the class give back what an object keeps there, and those of this one never will."""
    if len(kept) != 1 or not kept[0].startswith("."):
        return False
    told = _told(recogniser.calls, cls, call, kept[0])
    if not told:
        return False
    ends = False
    for method in _methods(recogniser.calls, cls):
        own = method.owner
        if own is None or method.name in BEGINNING or f"{own}{kept[0]}" not in method.text:
            continue
        here = frozenset((f"{own}.{name}", constant) for name, constant in told)
        place = (own, *kept)
        by_others = summaries.answer(Question(method, place, value, protocol))
        by_this = summaries.answer(Question(method, place, value, protocol, here))
        helper = method.name.startswith("_") and not method.name.startswith("__")
        shown = by_this.result is not None or _hands_out(method, f"{own}{kept[0]}")
        if by_this.fate is not Fate.BORROW or (shown and not helper):
            return False
        ends = ends or by_others.fate is Fate.RELEASE
    return ends and not _is_reached(recogniser, cls, kept[0], protocol)


def _told(calls: Calls, cls: Class, call: ast.Call, kept: str) -> Constants:
    """The fields that say no in this object, and in every other until somebody sets them to no again."""
    init = calls.model.method(cls, "__init__")
    no = {(field, constant) for field, constant in fields_told(calls, cls, call) if not constant}
    no |= set(asked_at_birth(init, kept)) if init else set()
    set_later = {
        target.attr
        for method in _methods(calls, cls)
        if method.name != "__init__"
        for target, source in assignments(method)
        if isinstance(target, ast.Attribute)
        if not (isinstance(source, ast.Constant) and not source.value)
    }
    return frozenset((name, constant) for name, constant in no if name not in set_later)


def asked_at_birth(init: Function, kept: str) -> Iterator[tuple[str, bool]]:
    """`self.owns = slot is None`, of a slot that is there and stays in that field."""
    given = {name for name, field in fields_set(init) if f".{field}" == kept}
    for target, source in assignments(init):
        match target, source:
            case ast.Attribute(attr=field), ast.Compare(
                left=ast.Name(id=name),
                ops=[ast.Is() | ast.IsNot() as op],
                comparators=[ast.Constant(value=None)],
            ) if name in given:
                yield field, isinstance(op, ast.IsNot)


def _methods(calls: Calls, cls: Class) -> Iterator[Function]:
    for each in calls.model.lineage(cls):
        yield from each.methods.values()


def _is_reached(recogniser: Recogniser, cls: Class, kept: str, protocol: str) -> bool:
    """Whether somebody gives back what lies in a field so named of an object that is not his own."""
    for module in recogniser.calls.model.project.parsed():
        if kept not in module.text:
            continue
        for function in list(module.by_node.values()):
            for call in function.calls:
                for position, argument in enumerate(call.args):
                    if _reaches(recogniser.calls, argument, cls, kept, function) and (
                        looks_releasing(call) or recogniser.releases(function, call, position, protocol)
                    ):
                        return True
    return False


def _reaches(calls: Calls, argument: ast.expr, cls: Class, kept: str, function: Function) -> bool:
    for node in walk(argument):
        if isinstance(node, ast.Attribute) and f".{node.attr}" == kept:
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id == function.owner:
                continue
            held = calls.model.type_of(function, owner)
            if not isinstance(held, Class) or cls in calls.model.lineage(held):
                return True
    return False


def _hands_out(method: Function, place: str) -> bool:
    """`return self.row`: whoever asks may give it back."""
    leaving = (node.value for node in method.statements if isinstance(node, ast.Return))
    return any(
        part is not None and ast.unparse(part) == place
        for value in leaving
        for part in (value.elts if isinstance(value, ast.Tuple) else [value])
    )
