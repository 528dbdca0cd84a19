"""Calls that are asked whether they worked: `if channel.push(chunk):`. No list or queue of Python's says so.

Where the function gives back what was refused, `if link.push(chunk): return True` and `pool.free(chunk)`, the
other side keeps the rest."""

from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Assume, Call
from auditor.project.code.modules import Function
from auditor.project.meaning.library import APPENDING
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.telling import asked_of, names_of_answer


def answers_as_a_borrower(recogniser: Recogniser, function: Function, call: Call) -> bool:
    """It may have kept nothing."""
    asked = call.method in APPENDING and call.method != "setdefault" and asked_of(function.graph, call)
    return asked and not _gives_back_refused(recogniser, function, call)


def _gives_back_refused(recogniser: Recogniser, function: Function, call: Call) -> bool:
    graph = function.graph
    pending = _where_refused(graph, call)
    seen = set(pending)
    while pending:
        node = pending.pop()
        op = graph.ops[node]
        if isinstance(op, Call):
            if recogniser.release_source(function, op.at) is not None:
                return True
            if recogniser.source(function, op.at) is not None:
                continue  # what comes behind is of another lease
        for following, edge in graph.successors[node]:
            if edge not in RAISING and following not in seen:
                seen.add(following)
                pending.append(following)
    return False


def _where_refused(graph: Graph, call: Call) -> list[int]:
    names = names_of_answer(graph, call)
    return [
        node
        for node, op in enumerate(graph.ops)
        if isinstance(op, Assume) and not op.value and op.subject is not None and op.subject[0] in names
    ]
