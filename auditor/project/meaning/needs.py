"""What must be known of other functions before one can say what it does to what it is given.

Flow-insensitively: the calls to which a body may pass the lease, or what it lies in. Of
`scheduler.pool.rows` that is whoever is given the scheduler, its pool or the rows, under whatever name, and
nobody who is given another field of the scheduler: that would be everybody."""

from collections.abc import Iterator
from dataclasses import dataclass

from auditor.flow.effects import Value
from auditor.flow.operands import operands
from auditor.ir.graph import TooLarge
from auditor.ir.ops import Call, Make, Move, Path, Unpack
from auditor.project.code.calls import Calls, constants_passed, is_bound, parameter_for
from auditor.project.code.modules import Function


@dataclass(frozen=True, slots=True)
class Question:
    """What does `function` do to a lease at `place` (rooted at a parameter or captured name)?"""

    function: Function
    place: Path
    value: Value
    protocol: str
    constants: frozenset[tuple[str, object]] = frozenset()


def needed(question: Question, calls: Calls) -> Iterator[Question]:
    """What its body may ask of functions that it calls."""
    function = question.function
    try:
        ops = function.graph.ops
    except (TooLarge, RecursionError):
        return
    places = [question.place]
    for op in ops:
        match op:
            case Move(target=target, source=source) | Unpack(targets=((_, target), *_), source=source):
                places += [each for each in _moved(places, source, target) if each not in places]
            case Make(target=target, items=items):
                if any(_rest(place, path) is not None for _, path in items for place in places):
                    places.append(target[:1])
    for op in ops:
        if isinstance(op, Call):
            yield from _passed_on(question, op, places, calls)


def _passed_on(question: Question, op: Call, places: list[Path], calls: Calls) -> Iterator[Question]:
    given = [
        (position, rest)
        for position, path in operands(op)
        for place in places
        if (rest := _rest(place, path)) is not None
    ]
    for target in calls.targets(question.function, op.at)[0] if given else ():
        bound = is_bound(target, op.at)
        for position, rest in given:
            parameter = parameter_for(target, position, bound)
            if parameter is not None:
                constants = constants_passed(target, op.at, bound)
                yield Question(target, (parameter, *rest), question.value, question.protocol, constants)


def _moved(places: list[Path], source: Path, target: Path) -> Iterator[Path]:
    for place in places:
        rest = _rest(place, source)
        if rest is not None:
            yield (*target, *rest)


def _rest(place: Path, operand: Path) -> Path | None:
    """Where below the operand the lease lies, nowhere deeper where the operand is a piece of it; None where
    they have nothing to do with each other."""
    if any(not _alike(one, two) for one, two in zip(place, operand, strict=False)):
        return None
    return place[len(operand) :]


def _alike(one: str, two: str) -> bool:
    return one == two or (one.startswith("[") and two.startswith("["))
