"""A field that one method releases and leaves in place, and a cleanup method releases again."""

import ast
import re
from collections.abc import Iterable, Iterator

from auditor.flow.effects import Handle, Value
from auditor.flow.misuse import Fault, Misuse
from auditor.flow.operands import operands
from auditor.flow.trace import span_of
from auditor.ir.ops import Call, Path
from auditor.model import Step
from auditor.project.code.modules import Class, Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.released import released_value
from auditor.project.misuse.story import place_of
from auditor.project.misuse.uses import Endings, Ends

CLEANUP = re.compile(
    r"close|__exit__|__aexit__|__del__|(?:clean_?up|shutdown|dispose|destroy|tear_?down|release|free)(?:_\w+)?"
)

Release = tuple[Function, int, Value]


class TwiceByMethods:
    """Compares the methods of a class that surely release the same field."""

    def __init__(self, recogniser: Recogniser, endings: Endings) -> None:
        self.recogniser = recogniser
        self.endings = endings
        self.fields: dict[tuple[Class, Path], list[Release]] = {}

    def keeping(self) -> dict[Function, tuple[Path, Value]]:
        """Public methods that surely release a field and keep it, once all releases were seen."""
        found = {}
        for (_, field), releases in self.fields.items():
            for function, _, value in releases:
                ends = self._ends(function, field, value)
                if not function.name.startswith("_") and ends.all_ways and ends.kept and not ends.tolerant:
                    found[function] = (field, value)
        return found

    def misuses(self, releasing: Iterable[tuple[Function, list[int]]]) -> Iterator[Misuse]:
        for function, nodes in releasing:
            for node in nodes:
                for field, value in self._fields(function, node):
                    assert function.cls is not None
                    self.fields.setdefault((function.cls, field), []).append((function, node, value))
        for (cls, field), releases in self.fields.items():
            yield from self._pairs(field, releases)
            yield from self._closed_at_the_end(cls, field, releases)

    def _fields(self, function: Function, node: int) -> Iterator[tuple[Path, Value]]:
        """`self.field`, where this call gives it back."""
        call = function.graph.ops[node]
        if not function.is_method or not isinstance(call, Call) or not function.parameters:
            return
        value = released_value(self.recogniser, function, call)
        if value is None and self._taken_for_good(function, call):
            value = Value.OBJECT
        for position, path in operands(call):
            if value is None or len(path) != 2 or path[0] != function.parameters[0]:
                continue
            release = self.endings.uses(function).release(call, position, (), value, "")
            if release is not None and not release.tolerant:
                yield path[1:], value

    def _taken_for_good(self, function: Function, call: Call) -> bool:
        """A lock or a permit that the constructor takes, and no other method: the object stands for it."""
        cls, lock = function.cls, call.receiver
        if cls is None or lock is None or len(lock) != 2:
            return False
        taking = {
            name
            for name, method in cls.methods.items()
            for each in method.calls
            if isinstance(each.func, ast.Attribute)
            and isinstance(each.func.value, ast.Attribute)
            and "." + each.func.value.attr == lock[1]
            and (source := self.recogniser.source(method, each)) is not None
            and source.handle is Handle.RECEIVER
        }
        if taking == {"__init__"}:
            return True
        last = cls.methods.get("__del__")  # nothing is left then that could have taken it again
        if not taking or last is None or not last.parameters:
            return False
        again = "".join((last.parameters[0], lock[1], ".", call.method))
        repeated = any(ast.unparse(each.func) == again for each in last.calls)
        return repeated and (function is last or CLEANUP.fullmatch(function.name) is None)

    def _closed_at_the_end(self, cls: Class, field: Path, releases: list[Release]) -> Iterator[Misuse]:
        """`close()` releases, keeps the field, and is what `__del__` calls as well."""
        last = cls.methods.get("__del__")
        for function, node, value in releases:
            ends = self._ends(function, field, value)
            if last is None or function is last or function.name.startswith("_"):
                continue
            if ends.all_ways and ends.kept and self._calls(last, function):
                span = place_of(function, node)
                name = f"`self{''.join(field)}`"
                at = span_of(cls.module.path, last.node, cls.module.lines)
                again = Step(at.path, at.line, at.column, "`__del__` calls it again")
                first = Step(span.path, span.line, span.column, f"`{function.name}` keeps the field")
                yield Misuse(Fault.TWICE, span, function.qualname, name, "__del__", (again, first))

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
