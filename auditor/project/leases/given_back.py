"""What a function gives back to a pool, and by that says to be lent by it: a local name, a field of one, or
what lies in a record that it ends (`staged.recycle()`); by the methods of the pool or their second names."""

import ast
from collections.abc import Iterator, Mapping, Sequence

from auditor.flow.effects import Handle, Position
from auditor.ir.ops import Path
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.pools.halves import Pair, asked_alone


def lends(pair: Pair) -> bool:
    return not pair.acquires[0].name.kind and any(half.handle is Handle.RESULT for half in pair.acquires)


def given_back_in(
    recogniser: Recogniser, function: Function, calls: list[ast.Call]
) -> Iterator[tuple[Path, Pair]]:
    """Locals, or fields of theirs, that are given back here, with the pair that says so."""
    for call in calls:
        pairs = _pairs_ended(recogniser, function, call)
        if len(pairs) == 1 and lends(pairs[0]) and (ended := _ends_itself(recogniser, function, call)):
            yield ended, pairs[0]
        for position, argument in enumerate(call.args) if len(pairs) == 1 and lends(pairs[0]) else ():
            match argument:
                case ast.Name(id=name):
                    thing: Path = (name,)
                case ast.Attribute(value=ast.Name(id=name), attr=field) if name != function.owner:
                    thing = (name, f".{field}")
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int() | str() as part)):
                    thing = (name, f"[{part!r}]")
                case _:
                    continue
            if _gives_back(recogniser, function, call, position):
                yield thing, pairs[0]


def own_given_back(
    recogniser: Recogniser, method: Function, calls: list[ast.Call]
) -> Iterator[tuple[str, Pair]]:
    """Fields of its own object that a method gives back: `self.pool.put(self.buffer)`."""
    for call in calls if method.owner is not None else ():
        pairs = _pairs_ended(recogniser, method, call)
        for position, argument in enumerate(call.args) if len(pairs) == 1 and lends(pairs[0]) else ():
            field = own_attribute(argument, method.owner or "")
            if field is not None and _gives_back(recogniser, method, call, position):
                yield field, pairs[0]


def ended_records(
    recogniser: Recogniser, function: Function, ending: Mapping[Function, Sequence[tuple[str, Pair]]]
) -> Iterator[tuple[Path, Pair]]:
    """`staged.recycle()`, of a local name, which gives back what lies in `staged.buffer`."""
    for call in function.calls:
        match call.func:
            case ast.Attribute(value=ast.Name(id=name)) if name != function.owner:
                targets = recogniser.calls.targets(function, call)[0]
                for field, pair in ending.get(targets[0], ()) if len(targets) == 1 else ():
                    yield (name, f".{field}"), pair


def handing_to(end: Function) -> Iterator[Function]:
    """`free(row)` beside `discard(row)`, which is all that it calls: a second name."""
    for method in end.cls.methods.values() if end.cls is not None else ():
        asked = asked_alone(method)
        if asked is not None and asked[0] is end:
            told = [getattr(each, "id", "") for each in asked[1].args]
            if told == [name for name in method.parameters if name != method.owner]:
                yield method


def _pairs_ended(recogniser: Recogniser, function: Function, call: ast.Call) -> list[Pair]:
    """Of the methods of pools that the call may reach, by their second names as well."""
    reached = recogniser.calls.targets(function, call)[0]
    meant = [asked[0] if (asked := asked_alone(each)) is not None else each for each in reached]
    return [recogniser.releasing[each][0] for each in meant if each in recogniser.releasing]


def _gives_back(recogniser: Recogniser, function: Function, call: ast.Call, position: Position) -> bool:
    """The argument, by a method of a pool, or what comes first by a second name of one."""
    reached = recogniser.calls.targets(function, call)[0]
    renamed = position == 0 and bool(reached) and all(asked_alone(each) is not None for each in reached)
    return renamed or bool(recogniser.releases(function, call, position))


def _ends_itself(recogniser: Recogniser, function: Function, call: ast.Call) -> Path | None:
    """`segment.surrender()`, of a local name."""
    targets = recogniser.calls.targets(function, call)[0]
    halves = [recogniser.releasing[target][1] for target in targets if target in recogniser.releasing]
    match call.func:
        case ast.Attribute(value=ast.Name(id=name)) if (
            name != function.owner and name not in function.parameters
        ):
            if halves and all(half.handle is Handle.RECEIVER for half in halves):
                return (name,)
    return None
