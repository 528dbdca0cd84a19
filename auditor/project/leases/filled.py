"""Functions that put a lease into an object they are told: `self.prepare(request)`, which allocates its slot.

Whoever made that object owes what lies in it, as if he had put it there himself."""

import ast

from auditor.flow.effects import Handle
from auditor.ir.ops import ANY_ITEM
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.source import Source
from auditor.project.outcome import Outcome
from auditor.project.shapes.field_work import field_work

FILLED = 3
"""The object, its field, and an item of that: what lies deeper is some other object's."""


def note_filled(recogniser: Recogniser, source: Source, outcome: Outcome) -> None:
    """What its callers acquire in one of their arguments, if that is the only place where it is left."""
    function = outcome.function
    if function not in recogniser.acquiring and (told := _filled(function, source, outcome)):
        recogniser.wrappers.setdefault(function, told)


def _filled(function: Function, source: Source, outcome: Outcome) -> Source | None:
    places = {*(path for _, path in outcome.stored), *outcome.beside}
    roots = {path[0] for path in places}
    if outcome.returned is not None or outcome.acquisition.handle is not Handle.RESULT or len(roots) != 1:
        return None
    (root,) = roots
    if root == function.owner or root not in function.graph.parameters or _is_kept(function, root):
        return None
    rest = min(places, key=lambda path: (len(path), path))[1:]
    if not rest or len(rest) >= FILLED or any(map(_is_one_of_a_list, rest)):
        return None
    return Source(
        source.protocol,
        source.origin,
        Handle.RESULT,
        source.value,
        0,
        rest,
        flags=outcome.says,
        own=outcome.own,
        unless=outcome.unless,
        asked=outcome.asked,
        into=root,
    )


def _is_kept(function: Function, told: str) -> bool:
    """`self.live[request.id] = request`, before something is put into the request: others know it by now."""
    return any(isinstance(put.value, ast.Name) and put.value.id == told for put in field_work(function).put)


def _is_one_of_a_list(piece: str) -> bool:
    """`[0]`; not any of them, nor what a table has under a name."""
    return piece[0] == "[" and piece != ANY_ITEM and piece[1] not in "\"'"
