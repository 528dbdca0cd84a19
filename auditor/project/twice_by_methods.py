"""A field that one method releases and leaves in place, and a cleanup method releases again."""

import re
from collections.abc import Iterable, Iterator

from auditor.flow.effects import Value
from auditor.flow.misuse import Fault, Misuse
from auditor.flow.passing import operands
from auditor.ir.ops import Call, Path
from auditor.model import Step
from auditor.project.misuse_story import place_of
from auditor.project.modules import Class, Function
from auditor.project.recognise import Recogniser
from auditor.project.released import released_value
from auditor.project.uses import Endings, Ends

CLEANUP = re.compile(
    r"close|__exit__|__aexit__|__del__|(?:clean_?up|shutdown|dispose|destroy|tear_?down|release|free)(?:_\w+)?"
)

Release = tuple[Function, int, Value]


class TwiceByMethods:
    """Compares the methods of a class that surely release the same field."""

    def __init__(self, recogniser: Recogniser, endings: Endings) -> None:
        self.recogniser = recogniser
        self.endings = endings

    def misuses(self, releasing: Iterable[tuple[Function, list[int]]]) -> Iterator[Misuse]:
        fields: dict[tuple[Class, Path], list[Release]] = {}
        for function, nodes in releasing:
            for node in nodes:
                for field, value in self._fields(function, node):
                    assert function.cls is not None
                    fields.setdefault((function.cls, field), []).append((function, node, value))
        for (_, field), releases in fields.items():
            yield from self._pairs(field, releases)

    def _fields(self, function: Function, node: int) -> Iterator[tuple[Path, Value]]:
        """`self.field`, where this call gives it back."""
        call = function.graph.ops[node]
        if not function.is_method or not isinstance(call, Call) or not function.parameters:
            return
        value = released_value(self.recogniser, function, call)
        for position, path in operands(call):
            if value is None or len(path) != 2 or path[0] != function.parameters[0]:
                continue
            release = self.endings.uses(function).release(call, position, (), value, "")
            if release is not None and not release.tolerant:
                yield path[1:], value

    def _pairs(self, field: Path, releases: list[Release]) -> Iterator[Misuse]:
        for function, node, value in releases:
            if CLEANUP.fullmatch(function.name) is None or not self._ends(function, field, value).all_ways:
                continue
            for earlier, other, _ in releases:
                ends = self._ends(earlier, field, value)
                if earlier is function or earlier.name.startswith("_") or not (ends.all_ways and ends.kept):
                    continue
                if not self._calls(function, earlier) and not self._calls(earlier, function):
                    yield self._told(field, function, node, earlier, other)

    def _ends(self, function: Function, field: Path, value: Value) -> Ends:
        return self.endings.of(function, (function.parameters[0], *field), value)

    def _calls(self, one: Function, other: Function) -> bool:
        return any(other in self.recogniser.calls.targets(one, call)[0] for call in one.calls)

    def _told(self, field: Path, function: Function, node: int, earlier: Function, other: int) -> Misuse:
        span, first = place_of(function, node), place_of(earlier, other)
        name = f"`self{''.join(field)}`"
        steps = (
            Step(
                first.path, first.line, first.column, f"released by `{earlier.name}`, which keeps the field"
            ),
            Step(span.path, span.line, span.column, f"released again by `{function.name}`"),
        )
        return Misuse(Fault.TWICE, span, function.qualname, name, earlier.name, steps)
