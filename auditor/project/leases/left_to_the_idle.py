"""Leases left to a callback, a task or a thread that never gives them back, where another method of the class
leaves its own to one that does:

    self.bus.issue("read", tag, on_done=self._done)     # def _done(self, tag): self.tags.put(tag)
    self.bus.issue("trim", tag, on_done=self._note)     # def _note(self, tag): self.last = (tag, now())

What else is told of the lease, the other method tells as well."""

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from auditor.flow.effects import Handle
from auditor.flow.lease import Leak, Loss
from auditor.flow.trace import span_of
from auditor.model import Step
from auditor.project.code.bindings import assignments, awaited, own_attribute
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function, last_part
from auditor.project.code.started import TASKS
from auditor.project.meaning.borrowers import may_keep
from auditor.project.meaning.sites import last_name
from auditor.project.outcome import Outcome, loses_normally
from auditor.source.nodes import walk

DEPTH = 2
"""So far it is looked for an end, through methods that a callback asks."""

THREADS = frozenset({"Thread", "Process"})
PUTTING = frozenset({"append", "appendleft", "add", "put", "put_nowait", "insert", "setdefault", "extend"})

Work = tuple[str, ast.Call, Function | ast.Lambda]
"""Whom it is left to, by what call, and what that runs."""


class LeftToTheIdle:
    """Asks it of each outcome."""

    def __init__(self, model: ClassModel) -> None:
        self.model = model

    def told(self, outcome: Outcome, ends: Set[str]) -> Outcome:
        lease, function = outcome.lease, outcome.function
        lent = outcome.acquisition.handle is Handle.RESULT and not outcome.acquisition.declared
        left = lease.handed_over and not (lease.released or outcome.stored or loses_normally(lease))
        if not (lent and left) or function.cls is None or outcome.returned == ():
            return outcome
        works = list(self._works(function))
        names = _names_of(outcome)
        if not works or not names or any(self._ends(work, function, ends) for _, _, work in works):
            return outcome
        if outcome.returned and _is_ended_by_its_field(outcome.returned[-1][1:], function, ends):
            return outcome
        for whom, call, work in works:
            told = names if isinstance(work, ast.Lambda) or work.parent is function else set(work.parameters)
            if not _keeps(work, told) and self._is_left_to_others(outcome, whom, call, names, ends):
                return _lost(outcome, call)
        return outcome

    def _is_left_to_others(
        self, outcome: Outcome, whom: str, call: ast.Call, names: Set[str], ends: Set[str]
    ) -> bool:
        """Another method that takes a lease as well leaves it there to what ends it, and tells at least those
        of it that this one tells."""
        function = outcome.function
        assert function.cls is not None
        within = {id(node) for node in walk(call)}
        told = {
            ast.unparse(each.func)
            for each in function.calls
            if id(each) not in within and _is_told(each, names) and _is_unknown(each, names)
        }
        return any(
            each is not function
            and each.calling(last_name(outcome.call))
            and told <= {ast.unparse(asked.func) for asked in each.calls}
            and any(other == whom and self._ends(work, each, ends) for other, _, work in self._works(each))
            for each in function.cls.methods.values()
        )

    def _works(self, function: Function) -> Iterator[Work]:
        """What the function hands out to be run later."""
        for call in function.calls:
            for given in (*call.args, *(each.value for each in call.keywords)):
                if (work := self._work(given, function, last_name(call) in TASKS)) is not None:
                    yield ast.unparse(call.func), call, work
            made = self.model.callee(function, call.func)
            if isinstance(made, Class) and not THREADS.isdisjoint(map(last_part, made.node.bases)):
                run = made.methods.get("run")
                if run is not None:
                    yield "<thread>", call, run

    def _work(self, given: ast.expr, function: Function, started: bool) -> Function | ast.Lambda | None:
        match given:
            case ast.Lambda():
                return given
            case ast.Name(id=name):
                return function.nested.get(name)
            case ast.Attribute():
                return self._own(given, function)
            case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial"), args=[inner, *_]):
                return self._work(inner, function, started)
            case ast.Call(func=ast.Attribute() as called) if started:
                return self._own(called, function)
        return None

    def _own(self, node: ast.Attribute, function: Function) -> Function | None:
        name = own_attribute(node, function.owner or "")
        return self.model.method(function.cls, name) if name is not None and function.cls else None

    def _ends(
        self, work: Function | ast.Lambda, function: Function, ends: Set[str], depth: int = DEPTH
    ) -> bool:
        """By itself, or by a method of the object that it asks."""
        of = work if isinstance(work, Function) else function
        nodes: Sequence[ast.AST] = work.nodes if isinstance(work, Function) else list(walk(work))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        if any(last_name(call) in ends for call in calls):
            return True
        asked = (self._own(call.func, of) for call in calls if isinstance(call.func, ast.Attribute))
        return depth > 0 and any(each and self._ends(each, each, ends, depth - 1) for each in asked)


def _is_ended_by_its_field(name: str, function: Function, ends: Set[str]) -> bool:
    """`self.tags.put(worker.tag)`, of a thread that was handed on."""
    return any(
        isinstance(part, ast.Attribute)
        and part.attr == name
        and own_attribute(part, each.owner or "") is None
        for each in function.module.by_node.values()
        for end in ends
        for call in each.calling(end)
        for given in call.args
        for part in walk(given)
    )


def _names_of(outcome: Outcome) -> set[str]:
    return {
        target.id
        for target, value in assignments(outcome.function)
        if isinstance(target, ast.Name) and awaited(value) is outcome.call
    }


def _is_told(call: ast.Call, names: Set[str]) -> bool:
    given = (*call.args, *(each.value for each in call.keywords))
    return any(isinstance(node, ast.Name) and node.id in names for each in given for node in walk(each))


def _is_unknown(call: ast.Call, names: Set[str]) -> bool:
    """Not a method of the lease itself."""
    return not (isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") in names)


def _keeps(work: Function | ast.Lambda, told: Set[str]) -> bool:
    """It puts what it is told somewhere as it is, or hands it on: `self.waiting.append(tag)`."""
    nodes: Sequence[ast.AST] = work.nodes if isinstance(work, Function) else list(walk(work))
    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=ast.Name(id=name)) if name in told:
                if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
                    return True
            case ast.Call(args=args):
                bare = any(isinstance(each, ast.Name) and each.id in told for each in args)
                if bare and (last_name(node) in PUTTING or may_keep(node)):
                    return True
    return False


def _lost(outcome: Outcome, call: ast.Call) -> Outcome:
    lease, module = outcome.lease, outcome.function.module
    at = span_of(module.path, call, module.lines)
    begun = Step(lease.span.path, lease.span.line, lease.span.column, "acquired here")
    last = Step(at.path, at.line, at.column, "left to what never gives it back")
    leak = Leak(Loss.RETURN, at, lease.holder, (begun, last))
    return replace(outcome, lease=replace(lease, leaks=(*lease.leaks, leak)))
