"""One more user of what others have, counted for whoever gets the result.

    table.ref(beam.slot)
    return replace(beam, score=score)      # or `Beam(tokens, beam.slot)`: the new record has the new user

    return self.current.retain()           # which answers with the object itself

Of `return beam`, which the caller knew before, nobody can say whose the user is."""

import ast

from auditor.flow.effects import Acquisition, Handle, Value
from auditor.flow.held import Held
from auditor.ir.graph import Graph
from auditor.ir.ops import RESULT, Call, Leave, Move
from auditor.ir.record_copies import copies_a_record


def goes_with_the_result(graph: Graph, site: int, acquisition: Acquisition, held: Held, op: Leave) -> bool:
    if acquisition.handle is Handle.ARGUMENT and acquisition.value is not Value.AMOUNT:
        return _lies_in_a_record_made_here(graph, held, op)
    if acquisition.handle is Handle.RECEIVER and _lies_in_what_was_found(graph, acquisition, held):
        return True
    counted = acquisition.handle is Handle.RECEIVER and acquisition.counts
    return counted and site >= 0 and RESULT in held.places and _is_answered(graph, site, acquisition)


def _lies_in_a_record_made_here(graph: Graph, held: Held, op: Leave) -> bool:
    results = [place[1:] for place in held.places if place[0] == RESULT[0]]
    if not results or not all(len(place) == 1 and place[0].startswith(".") for place in results):
        return False
    moved = (each for each in graph.ops if isinstance(each, Move) and each.target == RESULT)
    given = {each.source[0] for each in moved if each.at is op.at}
    return bool(given) and given <= graph.fresh_roots & _copies(graph)


def _lies_in_what_was_found(graph: Graph, acquisition: Acquisition, held: Held) -> bool:
    """`if replica.permits.try_enter(): return replica`, one of many: its caller has to know which permit to
    leave, and nobody else does."""
    root, *inside = acquisition.places[0]
    fields = len(inside) == 1 and inside[0].startswith(".")
    chosen = root not in graph.parameters and not root.startswith("@")
    return fields and chosen and not acquisition.declared and (RESULT[0], *inside) in held.places


def _copies(graph: Graph) -> set[str]:
    """Names of records that were copied here, or made like one that was told: `Beam(score, beam.slot)` of a
    `beam: Beam`. `Answer(beam.slot)` may only say which slot it was."""
    told = _classes_told(graph.ops[0].at)
    found = {
        op.target[0]
        for op in graph.ops
        if isinstance(op, Call) and (copies_a_record(op.at) or op.method in told)
    }
    for op in graph.ops:
        if isinstance(op, Move) and op.source[0] in found and len(op.target) == len(op.source) == 1:
            found.add(op.target[0])
    return found


def _classes_told(function: ast.AST) -> set[str]:
    """What the parameters are annotated as."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return {ast.unparse(each.annotation).strip("'\"") for each in arguments if each.annotation is not None}


def _is_answered(graph: Graph, site: int, acquisition: Acquisition) -> bool:
    """The call's own result is what it is asked of, and is used."""
    call = graph.ops[site]
    if not isinstance(call, Call) or call.target not in acquisition.places:
        return False
    return any(isinstance(each, Move) and each.source == call.target for each in graph.ops)
