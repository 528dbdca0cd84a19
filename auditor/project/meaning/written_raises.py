"""Which exceptions a call raises in so many words: by a `raise` in the function that it reaches, or in what
that one asks, as far as no handler on the way is for it. A failure that the program itself spells out is one
that it expects."""

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence, Set

from auditor.project.code.annotations import named
from auditor.project.code.calls import Calls
from auditor.project.code.guards import WITHS, caught_names
from auditor.project.code.modules import Class, Function, last_part
from auditor.source.nodes import walk

Raised = tuple[str, ...]
"""The class of an exception and its bases, by their last names, nearest first."""

ALL = frozenset({"Exception", "BaseException"})
FARTHEST = 4
"""So many functions ask one another."""


def is_own(raised: Raised) -> bool:
    """Whether a project made the class: `RuntimeError` and `ValueError` say that nobody expects to go on."""
    return bool(raised) and not hasattr(builtins, raised[0])


class WrittenRaises:
    """Reads each function once."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._known: dict[tuple[Function, int], frozenset[Raised]] = {}
        self._expected: dict[tuple[Function, Raised], bool] = {}

    def by_call(self, function: Function, call: ast.Call, farthest: int = FARTHEST) -> frozenset[Raised]:
        """What the one function that it reaches raises, whatever stands around the call."""
        targets, constructed, _ = self.calls.targets(function, call)
        if len(targets) != 1 or targets[0] is function or (constructed is not None and not targets):
            return frozenset()
        return frozenset() if begins_later(function, targets[0], call) else self.by(targets[0], farthest)

    def by(self, function: Function, farthest: int = FARTHEST) -> frozenset[Raised]:
        if farthest == 0:
            return frozenset()
        key = function, farthest
        if key not in self._known:
            self._known[key] = frozenset(self._by_function(function, farthest - 1))
        return self._known[key]

    def leaving(self, function: Function, call: ast.Call) -> frozenset[Raised]:
        """The same as by the call, without what a handler around it is for."""
        return self.uncaught(function, call, self.by_call(function, call))

    def is_expected(self, function: Function, raised: Raised) -> bool:
        """Whether a project made the class, or whoever calls the function has a handler for it: `OSError` of
        a short write, after which the caller goes on."""
        if is_own(raised):
            return True
        if (function, raised) not in self._expected:
            self._expected[function, raised] = any(
                names & set(raised) - ALL for names in self._handled_around(function)
            )
        return self._expected[function, raised]

    def _handled_around(self, function: Function) -> Iterator[Set[str]]:
        """What handlers around calls of the function are for."""
        for module in self.calls.model.project.parsed():
            if f"{function.name}(" not in module.text:
                continue
            for caller in list(module.by_node.values()):
                for call in caller.calls if caller is not function else ():
                    named = last_part(call.func) == function.name
                    if named and function in self.calls.targets(caller, call)[0]:
                        guards = _guards_of(caller, call)
                        yield from (
                            caught_names(each) for each in guards if isinstance(each, ast.ExceptHandler)
                        )

    def uncaught(self, function: Function, node: ast.AST, raised: Iterable[Raised]) -> frozenset[Raised]:
        return frozenset(self._uncaught(function, node, raised))

    def _by_function(self, function: Function, farthest: int) -> Iterator[Raised]:
        """`self.grab() if self.free else None` asks where it knows that it will get something, as does who
        answers None where there is nothing."""
        for node in function.statements:
            if isinstance(node, ast.Raise):
                yield from self._uncaught(function, node, self._by_statement(function, node, farthest))
        chosen = [node for node in function.nodes if isinstance(node, ast.IfExp)]
        for call in function.calls if not says_none(function) else ():
            if not any(_within(call, [node.body, node.orelse]) for node in chosen):
                yield from self._uncaught(function, call, self.by_call(function, call, farthest))

    def _by_statement(self, function: Function, node: ast.Raise, farthest: int) -> Iterator[Raised]:
        if node.exc is not None:
            made = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(made, ast.Name | ast.Attribute) and (names := self._lineage(function, made)):
                yield names
            return
        for attempt, handler in _handlers_around(function, node):
            tried = [call for call in function.calls if _within(call, attempt.body)]
            passed = {each for call in tried for each in self.by_call(function, call, farthest)}
            yield from (each for each in passed if catches(handler, each))

    def _lineage(self, function: Function, made: ast.Name | ast.Attribute) -> Raised:
        last = made.attr if isinstance(made, ast.Attribute) else made.id
        found = named(self.calls.model.project, function.module, made)
        if not isinstance(found, Class):
            built_in = getattr(builtins, last, None)
            if isinstance(built_in, type) and issubclass(built_in, BaseException):
                return tuple(each.__name__ for each in built_in.__mro__[:-1])
            return (last,) if last[:1].isupper() else ()  # `raise error` passes on what it was told
        names = [each.name for each in self.calls.model.lineage(found)]
        bases = [base for each in self.calls.model.lineage(found) for base in each.node.bases]
        for base in bases:
            built_in = getattr(builtins, ast.unparse(base), None)
            if isinstance(built_in, type) and issubclass(built_in, BaseException):
                names += [each.__name__ for each in built_in.__mro__[:-1]]
        return tuple(dict.fromkeys(names))

    def _uncaught(self, function: Function, node: ast.AST, raised: Iterable[Raised]) -> Iterator[Raised]:
        guards = None
        for each in raised:
            guards = guards if guards is not None else list(_guards_of(function, node))
            if not any(catches(guard, each) for guard in guards):
                yield each


def says_none(function: Function) -> bool:
    """On one of its ways, in so many words."""
    returned = [node.value for node in function.statements if isinstance(node, ast.Return)]
    some = any(value is not None and not isinstance(value, ast.Constant) for value in returned)
    return some and any(value is None or isinstance(value, ast.Constant) for value in returned)


def begins_later(function: Function, target: Function, call: ast.Call) -> bool:
    """`gather(*(pool.checkout() for _ in range(n)))`: a coroutine raises where it is awaited. Those of
    `await gather(one(), other())` are spelled out, and awaited there."""
    if not isinstance(target.node, ast.AsyncFunctionDef):
        return False
    return not any(
        node.value is call
        or (
            isinstance(node.value, ast.Call)
            and last_part(node.value.func) == "gather"
            and call in node.value.args
        )
        for node in function.of_kind(ast.Await)
    )


def catches(guard: ast.AST, raised: Raised) -> bool:
    """Whether a handler, or a `suppress`, is for it."""
    if isinstance(guard, ast.ExceptHandler) and guard.type is None:
        return True
    names = caught_names(guard)
    return not names.isdisjoint(ALL) or not names.isdisjoint(raised)


def _guards_of(function: Function, node: ast.AST) -> Iterator[ast.AST]:
    for around in function.statements:
        if isinstance(around, ast.Try | ast.TryStar) and around.handlers and _within(node, around.body):
            yield from around.handlers
        elif isinstance(around, WITHS) and _within(node, around.body):
            yield around


def _handlers_around(
    function: Function, node: ast.Raise
) -> Iterator[tuple[ast.Try | ast.TryStar, ast.ExceptHandler]]:
    for around in function.statements:
        if isinstance(around, ast.Try | ast.TryStar):
            yield from ((around, handler) for handler in around.handlers if _within(node, handler.body))


def _within(node: ast.AST, body: Sequence[ast.AST]) -> bool:
    line = getattr(node, "lineno", 0)
    return any(
        part is node
        for statement in body
        if getattr(statement, "lineno", 0) <= line <= (getattr(statement, "end_lineno", 0) or 0)
        for part in walk(statement)
    )
