"""Methods that hand out what is in a field of their object, and empty it: `lane = guard.detach()`; or that
strike it off a list there, `return scope.keep(lane)`.

Another method put a lease there, `self.lane = self.yard.enter()`, and the object's own end finds nothing more
to give back: whoever gets it owes it."""

import ast
from collections.abc import Set

from auditor.flow.effects import Handle
from auditor.ir.ops import ANY_ITEM
from auditor.project.code.bindings import assignments, given_to, own_attribute
from auditor.project.code.field_paths import mentions, own_field
from auditor.project.code.modules import Function, last_part
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.filling_again import is_none, names_in
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.source import Source
from auditor.project.outcome import Outcome
from auditor.project.shapes.pieces import left_out
from auditor.project.shapes.pool_state import own_parameters


def note_detaching(recogniser: Recogniser, source: Source, outcome: Outcome) -> None:
    """What a method of the same class hands out of the fields that the lease was put into."""
    function, acquisition = outcome.function, outcome.acquisition
    if function.cls is None or acquisition.foreign or acquisition.opened:
        return
    if acquisition.handle is not Handle.RESULT:
        return
    fields = {path[1][1:] for _, path in outcome.stored if len(path) == 2 and own_field(function, path)}
    lists = {path[1][1:] for path in outcome.beside if path[2:] == (ANY_ITEM,) and own_field(function, path)}
    ends = recogniser.ending_names(source.protocol) if lists else frozenset[str]()
    for method in function.cls.methods.values() if fields or lists else ():
        if method in recogniser.acquiring or method is function or method.name.startswith("__"):
            continue
        handed_out = any(_hands_out(method, field) for field in fields)
        if handed_out or any(_lets_go(method, field, ends) for field in lists):
            recogniser.wrappers.setdefault(method, _handed_out(source))


def _handed_out(source: Source) -> Source:
    return Source(source.protocol, source.origin, Handle.RESULT, source.value, second_hand=True)


def _hands_out(method: Function, field: str) -> bool:
    """`lane, self.lane = self.lane, None`, and `return lane`; `None` on other ways."""
    own = method.owner
    if own is None or not mentions(method, field) or any(map(looks_releasing, method.calls)):
        return False
    put = [value for target, value in assignments(method) if own_attribute(target, own) == field]
    if not put or not all(map(is_none, put)):
        return False
    results = [node.value for node in method.statements if isinstance(node, ast.Return)]
    returned = [value for value in results if value is not None and not is_none(value)]
    return bool(returned) and all(_was_in(method, own, field, value) for value in returned)


def _lets_go(method: Function, field: str, ends: Set[str]) -> bool:
    """`self.mine.remove(lane)`, or `self.mine = [each for each in self.mine if each is not lane]`, and then
    `return lane`, which it was told."""
    told, own = own_parameters(method)[:1], method.owner or ""
    results = [node.value for node in method.statements if isinstance(node, ast.Return)]
    if not told or not results or not mentions(method, field):
        return False
    if any(looks_releasing(call) or last_part(call.func) in ends for call in method.calls):
        return False
    if not all(isinstance(value, ast.Name) and value.id == told[0] for value in results):
        return False
    struck = [
        call.args[0]
        for call in method.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("remove", "discard", "pop")
        and own_attribute(call.func.value, own) == field
        and call.args
    ]
    struck += [
        gone
        for target, value in assignments(method)
        if own_attribute(target, own) == field and (gone := left_out(value, target)) is not None
    ]
    return any(told[0] in names_in(gone) for gone in struck)


def _was_in(method: Function, own: str, field: str, value: ast.expr) -> bool:
    if not isinstance(value, ast.Name):
        return own_attribute(value, own) == field
    given = list(given_to(method, value.id))
    return bool(given) and all(own_attribute(each, own) == field for each in given)
