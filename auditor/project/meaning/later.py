"""What is done with a lease by a function that runs later: a closure, or what a thread or a task is to do."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from auditor.flow.effects import BORROWED, RELEASED, RELEASED_LATER, TAKEN, Fate, Position, Treatment, Value
from auditor.ir.ops import ANY_ITEM, Assume, Call, Path
from auditor.project.code.bindings import assignments
from auditor.project.code.calls import is_bound, parameter_for
from auditor.project.code.modules import Function, last_part
from auditor.project.code.release_names import looks_releasing
from auditor.project.meaning.needs import Question
from auditor.project.meaning.records_told import Constants
from auditor.project.meaning.summaries import Answer, Summaries
from auditor.project.meaning.uncalled import may_end_without, nobody_asks
from auditor.source.nodes import walk

WHEN_DONE = re.compile(
    r"(?:then|finally_|subscribe|defer|add_\w*(?:callback|listener|hook)\w*|(?:on|when)_\w+)$"
)
"""Methods by which an object is told whom to call when it is done, and it tells them of itself."""

ON_SOME_WAYS = Treatment(Fate.RELEASE, split=True)


@dataclass(frozen=True, slots=True)
class Later:
    """Answers for functions that one function makes or starts."""

    function: Function
    summaries: Summaries
    function_of: Callable[[ast.Lambda], Function]
    callee: Callable[[Function, ast.expr], object]

    def closure(self, call: Call, position: Position, rest: Path, value: Value, protocol: str) -> Treatment:
        """A closure that gives the lease back is called, or handed to somebody who will call it; what it
        returns may say that it did not."""
        if call.method == "partial" and position != -1:
            return Treatment(result=rest)
        nested = self._named(call, position)
        if nested is not None:
            name = rest[0][1:-1]
            by_default = name in nested.parameters  # `lambda done, buffer=buffer: ...`
            place = (name if by_default else f"@{name}", *rest[1:])
            answer = self.summaries.answer(Question(nested, place, value, protocol))
            left = _is_left_undone(nested, answer) or self._leaves_undone(nested, place, value, protocol)
            left = left and not _returns(nested, name)
            if left and (
                position != -1 or not answer.decided_by
            ):  # who calls it later tells it what he likes
                return replace(ON_SOME_WAYS, says=answer.says) if position == -1 else ON_SOME_WAYS
            if position != -1 and answer.fate is Fate.RELEASE:
                return self.told_an_end(call, position)
        return RELEASED if position == -1 and call.receiver is None else TAKEN

    def told_an_end(self, call: Call, position: Position) -> Treatment:
        """Of something that gives the lease back when it is called: by then, or not at all."""
        return ON_SOME_WAYS if self._is_left_uncalled(call, position) else RELEASED_LATER

    def _is_left_uncalled(self, call: Call, position: Position) -> bool:
        """`run_with(job, lambda: pool.put(row))`, which may return before it calls that."""
        target = self.callee(self.function, call.at.func)
        if not isinstance(target, Function) or not nobody_asks(self.function, call.at):
            return False
        parameter = parameter_for(target, position, is_bound(target, call.at))
        return parameter is not None and may_end_without(target, parameter)

    def _leaves_undone(self, passed: Function, place: Path, value: Value, protocol: str) -> bool:
        """`lambda done: self._landed(key, done)`, where that method gives it back on some ways only."""
        call = passed.node.body if isinstance(passed.node, ast.Lambda) else None
        target = self.callee(self.function, call.func) if isinstance(call, ast.Call) else None
        if not isinstance(call, ast.Call) or not isinstance(target, Function):
            return False
        name = place[0].lstrip("@")
        of_itself = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", None) == name
        told = [to for to, given in _told(call, target) if getattr(given, "id", None) == name]
        own = [target.owner] if of_itself and target.owner is not None else told
        answers = ((self.summaries.answer(Question(target, (to, *place[1:]), value, protocol))) for to in own)
        return any(_is_left_undone(target, answer) for answer in answers)

    def _named(self, call: Call, position: Position) -> Function | None:
        """The nested function that is called or passed by its name, or the lambda that is passed."""
        passed = self.passed(call, position)
        if isinstance(passed, ast.Lambda):
            return self.function_of(passed)
        return self.function.nested.get(passed.id) if isinstance(passed, ast.Name) else None

    def passed(self, call: Call, position: Position) -> ast.expr | None:
        if position == -1:
            return call.at.func
        if isinstance(position, int):
            return call.at.args[position] if position < len(call.at.args) else None
        # `submit(batch, callback=done)`
        return next((each.value for each in call.at.keywords if each.arg == position), None)

    def told_of_itself(self, call: Call, rest: Path, value: Value, protocol: str) -> Treatment | None:
        """`work.then(lambda done: pool.put(done.buffer))`: what an object calls back when it is done is told
        that object, with the lease in it. None where that function does not give it back."""
        if not WHEN_DONE.match(call.method) or not rest[0].startswith("."):
            return None
        for passed in call.at.args:
            told = self._told_first(passed)
            if told is not None:
                function, name = told
                answer = self.summaries.answer(Question(function, (name, *rest), value, protocol))
                if answer.fate is Fate.RELEASE:
                    return ON_SOME_WAYS if _is_left_undone(function, answer) else RELEASED_LATER
        return None

    def _told_first(self, passed: ast.expr) -> tuple[Function, str] | None:
        """The function that is passed, and what it calls the first thing that it is told; `partial(self.done,
        limit)` has told it something already."""
        before = 0
        match passed:
            case ast.Lambda():
                function: object = self.function_of(passed)
            case ast.Name(id=name) if name in self.function.nested:
                function = self.function.nested[name]
            case ast.Call(func=maker, args=[inner, *told]) if last_part(maker) == "partial":
                passed, before = inner, len(told)
                function = self.callee(self.function, inner)
            case _:
                function = self.callee(self.function, passed)
        if not isinstance(function, Function):
            return None
        bound = function.is_method and not function.is_static and isinstance(passed, ast.Attribute)
        told_to = function.parameters[before + bound :]
        return (function, told_to[0]) if told_to else None

    def worked_on(
        self,
        call: Call,
        target: Function,
        parameter: str,
        rest: Path,
        value: Value,
        protocol: str,
        told: Constants = frozenset(),
    ) -> Treatment:
        """A thread that closes nothing and ends leaves what it was given to nobody else."""
        answer = self.summaries.answer(Question(target, (parameter, *rest), value, protocol, told))
        if _is_left_undone(target, answer) and not (
            answer.decided_by and self._asked_here(call, target, answer)
        ):
            return ON_SOME_WAYS
        if _is_tabled_on_some_ways(target, answer) and _fields_asked(target).isdisjoint(
            _fields_asked(self.function)
        ):
            return ON_SOME_WAYS
        if any(_may_release(call, target, parameter) for call in target.calls):
            return TAKEN
        only_used = answer.fate is Fate.BORROW and answer.result is None
        return BORROWED if only_used else TAKEN

    def _asked_here(self, call: Call, target: Function, answer: Answer) -> bool:
        """What goes along with the lease has been looked at: the one who starts it knows what it will do."""
        deciding = [given for name, given in _told(call.at, target) if name in answer.decided_by]
        names = {node.id for given in deciding for node in walk(given) if isinstance(node, ast.Name)}
        return any(isinstance(op, Assume) and op.names & names for op in self.function.graph.ops)


def _told(call: ast.Call, target: Function) -> Iterator[tuple[str, ast.expr]]:
    """What a function that is called, or passed to somebody who calls it, is told, by its parameters."""
    at = next((at for at, given in enumerate(call.args) if last_part(given) == target.name), -1)
    own = target.is_method and not target.is_static
    given = call.args[at + 1 :]
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    match [*given, *([named["args"]] if "args" in named else [])]:
        case [ast.Tuple(elts=together)]:  # `Thread(target=self.work, args=(job, row))`
            given = together
    yield from zip(target.parameters[own:], given, strict=False)
    yield from named.items()


def _may_release(call: ast.Call, target: Function, parameter: str) -> bool:
    """It, or something of the object's own, by which it may be found: not a file that the work has opened."""
    names = {node.id for node in walk(call) if isinstance(node, ast.Name)}
    return looks_releasing(call) and not names.isdisjoint({parameter, target.owner})


def _is_left_undone(function: Function, answer: Answer) -> bool:
    """It gives the lease back on some ways only, and not because it does so once."""
    undone = answer.fate is Fate.RELEASE and answer.sometimes
    return undone and not _asks_what_it_sets(function)


def _is_tabled_on_some_ways(worker: Function, answer: Answer) -> bool:
    """`self.resident[key] = slot`, and `if key in self.resident: return None` above, with nobody left who
    knows of the slot."""
    own = worker.owner
    in_tables = all(path[0] == own and path[2:3] == (ANY_ITEM,) for path in answer.stored)
    return answer.fate is Fate.TAKE and answer.left and bool(answer.stored) and in_tables


def _fields_asked(function: Function) -> set[str]:
    tests = (node.test for node in function.statements if isinstance(node, ast.If | ast.While))
    return {part.attr for test in tests for part in walk(test) if isinstance(part, ast.Attribute)}


def _returns(function: Function, name: str) -> bool:
    """On some ways, to whoever waits for it."""
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    return any(isinstance(each, ast.Name) and each.id == name for each in returned)


def _asks_what_it_sets(function: Function) -> bool:
    """`if done: return`, then `done = True`; `left -= 1`, and `if left == 0:`."""
    told = assignments(function)
    set_here = {ast.unparse(target) for target, value in told if isinstance(value, ast.Constant)}
    set_here |= {ast.unparse(node.target) for node in function.statements if isinstance(node, ast.AugAssign)}
    tests = (node.test for node in function.statements if isinstance(node, ast.If | ast.While))
    asked = (part for test in tests for part in walk(test) if isinstance(part, ast.expr))
    return any(ast.unparse(part) in set_here for part in asked)
