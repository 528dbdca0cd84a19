"""Objects that are told, with what they are to hold, how it is given back: `Work(buf, self.pool.surrender)`,
whose `wait()` calls `self.done(self.buf)`, or `Grant(blocks, lambda: free(blocks))`.

Such an object has the lease; its methods that call what it was told end it."""

import ast
from collections.abc import Iterator

from auditor.flow.effects import Position, Value
from auditor.project.code.bindings import own_attribute
from auditor.project.code.kept_as_told import field_told
from auditor.project.code.modules import Class, Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.records_told import fields_set
from auditor.source.nodes import walk


def is_a_release(recogniser: Recogniser, function: Function, told: ast.expr) -> bool:
    """`pool.free`, `handle.close`: what is told it gives it back."""
    if not isinstance(told, ast.Attribute | ast.Name):
        return False
    name = told.attr if isinstance(told, ast.Attribute) else told.id
    imagined = ast.Call(func=told, args=[ast.Constant(value=None)], keywords=[])
    named = recogniser.releases_by_name(imagined, 0, Value.OBJECT) or name == "close"
    return named or recogniser.releases(function, imagined, 0) is True


class ToldEnds:
    """What the classes of the tree are told of ends."""

    def __init__(self, recogniser: Recogniser) -> None:
        self.recogniser = recogniser
        self._known: dict[Class, frozenset[str]] = {}

    def has_its_end(self, function: Function, call: ast.Call) -> bool:
        """An object is made that is told an end, and calls it of something that it has."""
        made = self.recogniser.calls.targets(function, call)[1]
        return made is not None and any(
            _is_called(self.recogniser, made, field) for field in self._told(function, call, made)
        )

    def field_of_closure(self, function: Function, call: ast.Call, position: Position) -> str | None:
        """`Grant(blocks, lambda: free(blocks))`, whose `close()` calls what it was told."""
        made = self.recogniser.calls.targets(function, call)[1] if position != -1 else None
        kept = _kept_as(self.recogniser, made, position) if made is not None else iter(())
        return next((field for field in kept if made and _is_called(self.recogniser, made, field)), None)

    def is_end(self, function: Function, call: ast.Call) -> bool:
        """`self.done(buf)` in a method of such an object."""
        field = own_attribute(call.func, function.owner or "")
        return field is not None and function.cls is not None and field in self._ends_of(function.cls)

    def _ends_of(self, cls: Class) -> frozenset[str]:
        if cls not in self._known:
            self._known[cls] = frozenset()
            self._known[cls] = frozenset(self._told_to(cls))
        return self._known[cls]

    def _told_to(self, cls: Class) -> Iterator[str]:
        project, calls = self.recogniser.calls.model.project, self.recogniser.calls
        for path, _ in project.mentioning(f"{cls.name}("):
            module = project.module(path)
            for function in list(module.by_node.values()) if module is not None else ():
                for call in function.calls:
                    if _names(call.func, cls.name) and calls.targets(function, call)[1] is cls:
                        yield from self._told(function, call, cls)

    def _told(self, function: Function, call: ast.Call, cls: Class) -> Iterator[str]:
        """Fields in which the object keeps an end."""
        told: dict[Position, ast.expr] = dict(enumerate(call.args))
        told.update((each.arg, each.value) for each in call.keywords if each.arg is not None)
        for position, given in told.items():
            if is_a_release(self.recogniser, function, given):
                yield from _kept_as(self.recogniser, cls, position)


def _names(called: ast.expr, name: str) -> bool:
    """`jobs.Work` and `Work[int]`"""
    return any(
        name in (node.attr if isinstance(node, ast.Attribute) else node.id)
        for node in walk(called)
        if isinstance(node, ast.Attribute | ast.Name)
    )


def _kept_as(recogniser: Recogniser, cls: Class, position: Position) -> Iterator[str]:
    init = recogniser.calls.model.method(cls, "__init__")
    if init is None:
        yield field_told(recogniser.calls.model, cls, position).removeprefix(".")
        return
    names = init.parameters[1:]
    name = names[position] if isinstance(position, int) and position < len(names) else position
    yield from (field for parameter, field in fields_set(init) if parameter == name)


def _is_called(recogniser: Recogniser, cls: Class, field: str) -> bool:
    """By a method that does not count first: `if self.arrived == self.expected: self.hook()`."""
    return any(
        own_attribute(call.func, method.owner or "") == field and not _counts(method)
        for each in recogniser.calls.model.lineage(cls)
        for method in each.methods.values()
        for call in method.calls
    )


def _counts(method: Function) -> bool:
    return any(
        isinstance(node, ast.Compare)
        and not isinstance(node.ops[0], ast.Is | ast.IsNot)
        and any(
            own_attribute(part, method.owner or "") is not None for part in (node.left, *node.comparators)
        )
        for node in method.nodes
    )
