"""Ways out that say that nothing was taken: the function answers as it does where it is refused.

A count or an amount may be given back anywhere, by whoever finds it noted. But `return False` behind
`if not budget.reserve(n): return False` tells the caller that there is nothing to give back. So does a pool
that takes from itself and answers `None` on one way, and what it took on another.
"""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.effects import Acquisition, Handle, Value
from auditor.flow.lease import Leak, Loss
from auditor.project.code.answers import NOTHING
from auditor.project.code.bindings import given_to, own_attribute, suites_of, ways
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function, last_part
from auditor.project.leases.told_by_both import asked_beside, sees_to_one_alone
from auditor.source.nodes import walk

NONE = ast.Constant(value=None)


def is_kept_by_others(acquired: Acquisition) -> bool:
    """A count, an amount, an object that is locked: whoever finds it noted may give it back."""
    return acquired.counts or acquired.value is Value.AMOUNT or acquired.handle is not Handle.RESULT


def undone_at(function: Function) -> set[int]:
    """Calls of `budget.unreserve(n); return None`, where another way answers otherwise, or `raise` in its
    place: what they undo is kept there."""
    answers = {_text(node) for node in function.statements if isinstance(node, ast.Return)}
    found: set[int] = set()
    refusing = NOTHING if not answers <= NOTHING else frozenset[str]()
    for node in function.statements:
        match node:
            case ast.If(body=[*undoing, ast.Return() as last]) if _text(last) in refusing:
                found.update(id(each) for statement in undoing for each in walk(statement))
            case ast.If(body=[*undoing, ast.Raise()]):
                found.update(id(each) for statement in undoing for each in walk(statement))
            case ast.If(body=[ast.Expr() as undone]) if sees_to_one_alone(function, node):
                found.update(id(each) for each in walk(undone))
    for suite in suites_of(function.node):
        match suite:
            case [*_, ast.If(body=[*_, ast.Expr() as undone]), ast.Return() as last] if (
                _text(last) in refusing
            ):
                found.update(id(each) for each in walk(undone))
            case [
                *_,
                ast.If(test=test, body=[*_, ast.Expr() as undone], orelse=[]),
                ast.Return() as last,
            ] if _is_missing(test) == _text(last):
                found.update(id(each) for each in walk(undone))
    return found


def undone_in_vain(function: Function, acquire: ast.Call) -> set[int]:
    """Calls of `self.slots.release(); return None` behind the loop in which nothing was found, where a permit
    goes with what is found."""
    if not _goes_with_it(function, acquire):
        return set()
    return {
        id(each)
        for suite in suites_of(function.node)
        if len(suite) > 2 and isinstance(suite[-3], ast.For | ast.While) and isinstance(suite[-2], ast.Expr)
        if isinstance(suite[-1], ast.Return) and _text(suite[-1]) in NOTHING
        for each in walk(suite[-2])
    }


def _is_missing(test: ast.expr) -> str:
    """`chunk` of `if chunk is None: self.share.release()`, before `return chunk`."""
    match test:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            return name
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)):
            return name
    return ""


def refusals(
    function: Function,
    calls: Calls,
    acquire: ast.Call,
    acquired: Acquisition,
    leaks: Sequence[Leak],
    kept: bool,
) -> tuple[Leak, ...]:
    """Of what is lost that which no caller can know of, told by an answer or an exception of the function's
    own. `kept`: on other ways it is noted for later. A permit goes with what is returned on other ways, as
    with a connection."""
    if not (is_kept_by_others(acquired) or kept):
        return ()
    returned = [node for node in function.statements if isinstance(node, ast.Return)]
    answers = {node.lineno: _text(node) for node in returned}
    if acquired.handle is Handle.ARGUMENT and not _names_of(function, acquire).isdisjoint(answers.values()):
        kept = True  # what goes by a key is handed out with what was found under it
    handed_on = acquired.handle is Handle.RECEIVER and not set(answers.values()) <= NOTHING
    refusing = {_text(node) for node in _refusing(function, acquire)}
    saying = (refusing | NOTHING if kept or handed_on else refusing) & NOTHING
    passing = {node.lineno for node in function.statements if _passes_on(node)}
    permit = acquired.handle is Handle.RECEIVER  # nobody knows of one by a key
    raised = tuple(
        leak for leak in leaks if permit and leak.loss is Loss.RAISE and leak.at.line not in passing
    )
    if answers and set(answers.values()) <= saying:
        return raised  # it always answers so
    if kept:
        saying |= {_text(node) for node in returned if _was_there(function, node.value)}
    doubtful = doubtful_lines(function, calls, acquire, handed_on)
    silent = frozenset({Loss.NEXT_TURN}) if kept else frozenset[Loss]()
    refused = [leak for leak in leaks if leak.loss is Loss.RETURN]
    saying_so = doubtful | {line for line, answer in answers.items() if answer in saying}
    untold = {id(leak) for leak in refused if leak.at.line in saying_so}
    untold |= set(map(id, raised))
    return tuple(leak for leak in leaks if leak.loss in silent or id(leak) in untold)


def _passes_on(statement: ast.stmt) -> bool:
    """Says nothing of its own: `raise`, `assert page`."""
    return isinstance(statement, ast.Assert) or (isinstance(statement, ast.Raise) and statement.exc is None)


def doubtful_lines(function: Function, calls: Calls, acquire: ast.Call, handed_on: bool = True) -> set[int]:
    """Where what it answers may say that there is nothing: `return self.pool.lease(origin)`."""
    refusing = {_text(node) for node in _refusing(function, acquire)}
    if not refusing and handed_on and _goes_with_it(function, acquire):
        refusing = {"None"}
    returned = [node for node in function.statements if isinstance(node, ast.Return)]
    return {node.lineno for node in returned if _may_refuse(function, calls, acquire, node.value, refusing)}


def _goes_with_it(function: Function, acquire: ast.Call) -> bool:
    """`self.pool.give(wire)`, `self.slots.release()` in a method that is told the wire: of a permit that
    was taken for none nobody knows."""
    if function.cls is None or not isinstance(acquire.func, ast.Attribute):
        return False
    its, way = ast.unparse(acquire.func.value), acquire.func.attr
    for method in function.cls.methods.values():
        told = set(method.parameters[1:])
        ends = any(
            not each.args and last_part(each.func) != way and ast.unparse(each.func.value) == its
            for each in method.calls
            if isinstance(each.func, ast.Attribute)
        )
        hands = any(getattr(arg, "id", "") in told for each in method.calls for arg in each.args)
        if method is not function and ends and hands:
            return True
    return False


def refusing_lines(function: Function) -> set[int]:
    """Where it answers that there is nothing, if it has other answers as well."""
    answers = {node.lineno: _text(node) for node in function.statements if isinstance(node, ast.Return)}
    refused = {line for line, answer in answers.items() if answer in NOTHING}
    return refused if len(refused) < len(answers) else set()


def _may_refuse(
    function: Function, calls: Calls, acquire: ast.Call, answer: ast.expr | None, refusing: Set[str]
) -> bool:
    """`return budget.reserve(a) and budget.reserve(b)`, `return a + b if a and b else 0`, and `return
    self.reserve(b)` behind `if not self.reserve(a): return False`: what says no may be the second."""
    match answer:
        case ast.BoolOp(op=ast.And(), values=[*first, _]):
            return acquire in first or bool(asked_beside(function, acquire, answer))
        case ast.IfExp(test=ast.BoolOp(op=ast.And(), values=asked), orelse=otherwise):
            answers_no = ast.unparse(otherwise) in NOTHING
            return answers_no and any(
                getattr(each, "id", "") in _names_of(function, acquire) for each in asked
            )
        case ast.Name(id=name):
            given = list(given_to(function, name))
            if _is_there_already(function, acquire, name) or _is_looked_at(function, answer):
                return False
            return len(given) == 1 and _may_refuse(function, calls, acquire, given[0], refusing)
        case ast.Call(func=func) if answer is not acquire and refusing:
            answers = [_answers(each) for each in calls.targets(function, answer)[0]]
            denies = any(refusing & each and not each <= refusing for each in answers)
            return denies or (not answers and last_part(func) == last_part(acquire.func))
    return False


def _is_there_already(function: Function, acquire: ast.Call, name: str) -> bool:
    """`url = self.pick()`, `if url is None: return None`, `self.budgets[url].take(n)`: then there is one."""
    if any(isinstance(each, ast.Name) and each.id == name for each in walk(acquire)):
        return True
    return any(
        isinstance(node, ast.If)
        and node.lineno < acquire.lineno
        and _is_missing(node.test) == name
        and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
        for node in function.statements
    )


def _is_looked_at(function: Function, answer: ast.Name) -> bool:
    """`if url is None: self.share.release()` before `return url`, which has seen to it, or `if url is not
    None:` around that."""
    asked = [
        node for node in function.statements if isinstance(node, ast.If) and node.lineno <= answer.lineno
    ]
    return any(
        _is_missing(node.test) == answer.id
        or (
            _is_there(node.test) == answer.id
            and any(each is answer for part in node.body for each in walk(part))
        )
        for node in asked
    )


def _is_there(test: ast.expr) -> str:
    match test:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return name
        case ast.Name(id=name):
            return name
    return ""


def _answers(method: Function) -> set[str]:
    given = (node.value for node in method.statements if isinstance(node, ast.Return))
    return {ast.unparse(way) for each in given for way in ways(each or NONE)}


def _was_there(function: Function, answer: ast.expr | None) -> bool:
    """`known = self.uploads.get(key)`, and `return known`: that says nothing of what was taken just now."""
    given = list(given_to(function, answer.id)) if isinstance(answer, ast.Name) else []
    return bool(given) and all(_looked_up(each, function.owner) for each in given)


def _looked_up(value: ast.expr, owner: str | None) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(value=table, attr="get")) | ast.Subscript(value=table):
            return owner is not None and own_attribute(table, owner) is not None
    return False


def _text(node: ast.Return) -> str:
    return ast.unparse(node.value) if node.value is not None else "None"


def _refusing(function: Function, acquire: ast.Call) -> Iterator[ast.Return]:
    """`if not budget.reserve(n): return None`, the answer under a name or not."""
    names = _names_of(function, acquire)
    for node in function.statements:
        match node:
            case ast.If(test=test, body=[*_, ast.Return() as last]):
                denied = [each.operand for each in walk(test) if isinstance(each, ast.UnaryOp)]
                if any(each is acquire or getattr(each, "id", None) in names for each in denied):
                    yield last


def _names_of(function: Function, acquire: ast.Call) -> set[str]:
    """What its answer is called."""
    return {
        target.id
        for node in function.statements
        if isinstance(node, ast.Assign) and node.value is acquire
        for target in node.targets
        if isinstance(target, ast.Name)
    }
