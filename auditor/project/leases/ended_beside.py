"""Two that one function begins alike, of which it ends the one and forgets the other:

    self.budget.charge(len(header))
    self.budget.charge(len(body))
    self.peer.send(header + body)
    self.budget.refund(len(body))

Who can end the second could be somebody else; but who ends the first here would have ended both."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import suites_of, told_by_position
from auditor.project.code.modules import Function, last_part
from auditor.project.code.release_names import looks_releasing
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import KEEPING, STORING
from auditor.source.nodes import walk


def ended_beside(function: Function, acquire: ast.Call, ends: Set[str]) -> bool:
    """`ends` are the names of what ends such leases."""
    suite = _suite_with(function, acquire)
    key = _key(acquire)
    if key is None or not suite:
        return False
    for other in _calls_in(suite):
        beside = _key(other)
        alike = ast.unparse(other.func) == ast.unparse(acquire.func) and other is not acquire
        if alike and beside is not None and ast.unparse(beside) != ast.unparse(key):
            ended = any(last_name(call) in ends and _tells(call, beside) for call in _calls_in(suite))
            if ended and not _goes_on(function, acquire, _names(key) - _names(beside), ends):
                return True
    return False


def latched_beside(function: Function, acquire: ast.Call, ends: Set[str]) -> bool:
    """The same of two objects: `self.catalog.latch()`, `self.stats.latch()`, and `self.catalog.unlatch()`,
    where no other method ends what it has not begun there."""
    suite, whom = _suite_with(function, acquire), _whom(acquire)
    if not suite or not whom or "." not in whom:
        return False
    ended = {_whom(call) for call in _calls_in(suite) if last_name(call) in ends}
    beside = {
        _whom(call)
        for call in _calls_in(suite)
        if last_name(call) == last_name(acquire) and _whom(call) not in ("", whom)
    }
    others = function.cls.methods.values() if function.cls is not None else ()
    loose = any(
        last_name(call) in ends and _whom(call) == whom
        for method in others
        for call in method.calls
        if method is function or all(_whom(each) != whom or last_name(each) in ends for each in method.calls)
    )
    given = (told for call in function.calls for _, told in told_by_position(call))
    shown = any(ast.unparse(each) == whom for each in (*given, *_returned(function)))
    return bool(beside & ended) and not (loose or shown)


def _whom(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _returned(function: Function) -> Iterator[ast.expr]:
    for node in function.statements:
        if isinstance(node, ast.Return) and node.value is not None:
            yield from node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]


def _key(call: ast.Call) -> ast.expr | None:
    return call.args[0] if call.args and not isinstance(call.args[0], ast.Starred | ast.Constant) else None


def _suite_with(function: Function, call: ast.Call) -> list[ast.stmt]:
    """The statements among which the call stands, under no condition that is not asked before them."""
    return next((suite for suite in suites_of(function.node) if call in _calls_in(suite)), [])


def _calls_in(suite: list[ast.stmt]) -> list[ast.Call]:
    """Of its own simple statements, and of what a `finally` in it does."""
    simple = [each for each in suite if isinstance(each, ast.Expr | ast.Assign | ast.AnnAssign)]
    last = [each for node in suite if isinstance(node, ast.Try) for each in node.finalbody]
    return [node for each in (*simple, *last) for node in walk(each) if isinstance(node, ast.Call)]


def _tells(call: ast.Call, key: ast.expr) -> bool:
    return any(ast.unparse(told) == ast.unparse(key) for _, told in told_by_position(call))


def _names(key: ast.expr) -> set[str]:
    return {node.id for node in walk(key) if isinstance(node, ast.Name)}


def _goes_on(function: Function, acquire: ast.Call, names: set[str], ends: Set[str]) -> bool:
    """Whether something of the key is ended, returned, renamed or put somewhere."""
    return not names or any(not names.isdisjoint(_names(value)) for value in _others(function, acquire, ends))


def _others(function: Function, acquire: ast.Call, ends: Set[str]) -> Iterator[ast.expr]:
    for node in function.nodes:
        match node:
            case ast.Return(value=value) | ast.Yield(value=value) if value is not None:
                yield value
            case ast.Assign(value=ast.Name() | ast.Tuple() | ast.Attribute() as value):
                yield value
            case ast.Call() if node is not acquire and _may_end(node, ends):
                yield from (told for _, told in told_by_position(node))


def _may_end(call: ast.Call, ends: Set[str]) -> bool:
    name = last_part(call.func)
    kept = name in STORING or KEEPING.match(name) is not None or name[:1].isupper()
    return kept or name in ends or looks_releasing(call)
