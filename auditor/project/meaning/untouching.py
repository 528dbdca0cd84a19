"""Which functions leave a field of what they are given alone: asked of each method of a class for each
field that holds a lease, and most methods have nothing to do with most fields."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from auditor.flow.effects import Effects, Treatment, Value
from auditor.ir.ops import Call, Capture, Op, Path
from auditor.project.code.modules import Function

UNCHANGED = Treatment()


@dataclass(slots=True)
class _Uses:
    """What a function does with one name."""

    components: set[str] = field(default_factory=set)  # the first attribute or item of each path from it
    called: list[Call] = field(default_factory=list)  # methods of it
    itself: bool = False  # it goes somewhere by itself


class Untouching:
    """Answers by what a body mentions, once read; a method of the same object that it calls is asked."""

    def __init__(self) -> None:
        self._uses: dict[Function, dict[str, _Uses]] = {}

    def leaves_alone(
        self, function: Function, place: Path, effects: Effects, value: Value, protocol: str
    ) -> bool:
        """Whether nothing happens there to a lease at the place, which begins with a parameter's attribute.
        Raises `ir.graph.TooLarge`."""
        uses = self._of(function).get(place[0])
        if uses is None:
            return True
        if uses.itself or not _apart(uses.components, place[1]):
            return False
        return all(
            effects.treatment(call, -1, place[1:], value, protocol) == UNCHANGED for call in uses.called
        )

    def _of(self, function: Function) -> dict[str, _Uses]:
        if function not in self._uses:
            self._uses[function] = _read(function)
        return self._uses[function]


def _apart(components: set[str], attribute: str) -> bool:
    return attribute not in components and all(component.startswith(".") for component in components)


def _read(function: Function) -> dict[str, _Uses]:
    found: dict[str, _Uses] = {}
    for op in function.graph.ops:
        if isinstance(op, Capture):
            for name in op.names:
                found.setdefault(name, _Uses()).itself = True
            continue
        receiver = op.receiver if isinstance(op, Call) else None
        for path in _mentioned(op):
            uses = found.setdefault(path[0], _Uses())
            if len(path) > 1:
                uses.components.add(path[1])
            elif path != receiver or (isinstance(op, Call) and _given(op, path)):
                uses.itself = True
            elif isinstance(op, Call):
                uses.called.append(op)
    return found


def _given(call: Call, path: Path) -> bool:
    """Also as an argument, or it is what the result is called."""
    told = [given for given, _ in call.args] + [given for _, given in call.kwargs]
    return path in told or path == call.target


def _mentioned(op: Op) -> Iterator[Path]:
    for each in fields(op):
        if each.name != "at":
            yield from _paths_in(getattr(op, each.name))


def _paths_in(value: object) -> Iterator[Path]:
    if not isinstance(value, tuple):
        return
    if value and all(isinstance(part, str) for part in value):
        yield value
    else:
        for part in value:
            yield from _paths_in(part)
