"""Methods that show what lies in a table of their object, and put it there first where it is missing.

`tile = self.master.get(name)`, `if tile is None: tile = self.master[name] = tiles.rent()`, `return tile`: its
callers get the same one again and again, and are owed nothing but by the object."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from auditor.project.code.bindings import own_attribute
from auditor.project.code.field_paths import own_field
from auditor.project.code.modules import Function
from auditor.project.fields.elsewhere import released_attributes
from auditor.project.meaning.recognise import Recogniser
from auditor.project.outcome import Outcome
from auditor.source.nodes import walk


def keep_what_is_shown(
    recogniser: Recogniser,
    outcomes: Mapping[int, Outcome],
    received: Mapping[Function, Sequence[Outcome]],
) -> None:
    """Where none of those who get it gives it back, and the object sees to other things of its own, it keeps
    this as well."""
    for outcome in list(outcomes.values()):
        got = received.get(outcome.function, ())
        if not _shows_again(outcome) or any(each.lease.released for each in got):
            continue
        if not _sees_to_others(recogniser, outcome):
            continue
        outcome.shown = True
        for each in (*got, *(outcomes[id(other.call)] for other in got if id(other.call) in outcomes)):
            each.lease = replace(each.lease, leaks=())


def _shows_again(outcome: Outcome) -> bool:
    if not outcome.recorded or outcome.acquisition.foreign or outcome.acquisition.keyed:
        return False
    tables = {path[1][1:] for path in outcome.beside if own_field(outcome.function, path)}
    return not tables.isdisjoint(_looked_up(outcome.function))


def _sees_to_others(recogniser: Recogniser, outcome: Outcome) -> bool:
    """A method of its class gives back to the same pool what lies in another field."""
    cls, names = outcome.function.cls, recogniser.ending_names(outcome.acquisition.protocol)
    pool = {node.attr for node in walk(outcome.call.func) if isinstance(node, ast.Attribute)}
    for method in cls.methods.values() if cls is not None else ():
        known = {call for call in method.calls if getattr(call.func, "attr", "") in names}
        released = released_attributes(method, of_others=False, known=known) if known else {}
        if any(method.owner in bases for field, bases in released.items() if field not in pool):
            return True
    return False


def _looked_up(function: Function) -> Iterator[str]:
    """Fields of which a method takes what stands under a key."""
    for node in function.nodes:
        match node:
            case (
                ast.Call(func=ast.Attribute(value=table, attr="get"))
                | ast.Subscript(value=table, ctx=ast.Load())
            ):
                yield own_attribute(table, function.owner or "") or ""
