"""What a method keeps in its object on some ways, and neither keeps nor gives back on others.

`hub.retain(adapter)`, then `self.warm.append(adapter)` only where there is room: the object gives back
what it keeps, and of the others nobody can tell, for the method answers alike. A hold that nobody keeps
anywhere may be anyone's to end; here the class has shown whose it is."""

import ast
from collections.abc import Iterator, Sequence

from auditor.flow.effects import Acquisition, Fate
from auditor.flow.held import Endings
from auditor.flow.lease import Leak, Loss
from auditor.ir.graph import Graph
from auditor.ir.ops import ANY_ITEM, Call, Path, Store
from auditor.project.code.modules import Function
from auditor.project.meaning.summaries import Question, Summaries

GOING_ON = frozenset({Loss.NEXT_TURN, Loss.REBOUND})


def passed_over(
    function: Function,
    summaries: Summaries,
    acquisition: Acquisition,
    endings: Endings,
    leaks: Sequence[Leak],
) -> tuple[Leak, ...]:
    """Of these losses those that no caller can know of."""
    if not leaks or not endings.kept or not acquisition.keyed or _asks_whether_it_is_there(function):
        return ()
    places = {_kept_in(function.graph, node) for node in endings.kept}
    if not any(_is_ended_there(function, summaries, acquisition, place) for place in sorted(places)):
        return ()
    answers = any(isinstance(node, ast.Return) and node.value is not None for node in function.statements)
    silent = GOING_ON if answers else GOING_ON | {Loss.FALL_THROUGH, Loss.RETURN}
    return tuple(leak for leak in leaks if leak.loss in silent)


def _kept_in(graph: Graph, node: int) -> Path:
    match graph.ops[node]:
        case Store(target=target):
            return tuple(ANY_ITEM if piece.startswith("[") else piece for piece in target)
        case Call(receiver=receiver) if receiver is not None:
            return (*receiver, ANY_ITEM)
    return ()


def _is_ended_there(function: Function, summaries: Summaries, acquisition: Acquisition, place: Path) -> bool:
    """Whether another method gives back what is in that field."""
    if len(place) < 2 or place[0] != function.owner:
        return False
    questions = (
        Question(other, (other.owner, *place[1:]), acquisition.value, acquisition.protocol)
        for other in _other_methods(function)
        if other.owner is not None and place[1] in other.text
    )
    return any(summaries.answer(question).fate is Fate.RELEASE for question in questions)


def _other_methods(function: Function) -> Iterator[Function]:
    own = function.cls.methods.values() if function.cls is not None else ()
    return (each for each in own if each is not function)


def _asks_whether_it_is_there(function: Function) -> bool:
    """`if adapter not in self.warm: self.warm.append(adapter)`: it is kept already."""
    compared = (node for node in function.nodes if isinstance(node, ast.Compare))
    return any(isinstance(op, ast.In | ast.NotIn) for node in compared for op in node.ops)
