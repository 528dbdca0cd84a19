"""What a method keeps in its object on some ways, and neither keeps nor gives back on others.

`hub.retain(adapter)`, then `self.warm.append(adapter)` only where there is room: the object gives back
what it keeps, and of the others nobody can tell, for the method answers alike. A hold that nobody keeps
anywhere may be anyone's to end; here the class has shown whose it is."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.effects import Acquisition, Fate
from auditor.flow.held import Endings
from auditor.flow.lease import Leak, Loss
from auditor.ir.graph import Graph
from auditor.ir.ops import ANY_ITEM, Call, Path, Store
from auditor.project.code.modules import Function
from auditor.project.meaning.needs import Question
from auditor.project.meaning.summaries import Summaries
from auditor.source.nodes import walk

GOING_ON = frozenset({Loss.NEXT_TURN, Loss.REBOUND})


def passed_over(
    function: Function,
    call: ast.Call,
    summaries: Summaries,
    acquisition: Acquisition,
    endings: Endings,
    leaks: Sequence[Leak],
) -> tuple[Leak, ...]:
    """Of these losses those that no caller can know of."""
    if not leaks or not acquisition.keyed or _asks_whether_it_is_there(function):
        return ()
    listed = {*_listed_in(function.graph, endings.taken | endings.kept)}
    kept = {_kept_in(function.graph, node) for node in endings.kept}
    listed = set() if kept - listed else listed
    places = kept | listed
    if not any(_is_ended_there(function, summaries, acquisition, place) for place in sorted(places)):
        return ()
    answers = any(isinstance(node, ast.Return) and node.value is not None for node in function.statements)
    told = answers and not (listed and _answers_for_all_turns(function, call))
    silent = GOING_ON if told else GOING_ON | {Loss.FALL_THROUGH, Loss.RETURN}
    return tuple(leak for leak in leaks if leak.loss in silent)


def _kept_in(graph: Graph, node: int) -> Path:
    match graph.ops[node]:
        case Store(target=target):
            return tuple(ANY_ITEM if piece.startswith("[") else piece for piece in target)
        case Call(receiver=receiver) if receiver is not None:
            return (*receiver, ANY_ITEM)
    return ()


def _listed_in(graph: Graph, taken: Set[int]) -> Iterator[Path]:
    """`self.held.setdefault(key, []).extend(taken)`."""
    for node in taken:
        match graph.ops[node]:
            case Call(
                at=ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Attribute(attr="setdefault")))),
                receiver=tuple() as row,
                method="extend",
            ):
                yield (*row, ANY_ITEM)


def _answers_for_all_turns(function: Function, call: ast.Call) -> bool:
    """The loop in which it is taken comes to its end, and what is answered then tells of no single turn."""
    loops = [node for node in function.nodes if isinstance(node, ast.For | ast.AsyncFor)]
    around = [{id(each) for each in walk(loop)} for loop in loops]
    around = [inside for inside in around if id(call) in inside]
    returns = [node for node in function.statements if isinstance(node, ast.Return)]
    return bool(around) and not any(id(node) in inside for node in returns for inside in around)


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
