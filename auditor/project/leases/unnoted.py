"""Amounts and counts that nobody can give back: `if not budget.take(n): return None` in a function that ends
with the amount taken and noted nowhere, and that never gives anything back to the budget itself.

Others may know of it where it goes into a record, or comes from one: that is followed, and no loss. So may
whoever finds what the way has put into an object since, `self.rows[key] = rows`, or has counted there."""

import ast
from collections.abc import Sequence, Set

from auditor.flow.effects import Acquisition, Handle, Value
from auditor.flow.follow import Followed
from auditor.flow.held import Endings
from auditor.flow.lease import Leak, Loss
from auditor.flow.trace import shortest_path
from auditor.ir.ops import Call, InPlace, Op, Store
from auditor.project.code.answers import NOTHING
from auditor.project.code.bindings import assignments, given_to
from auditor.project.code.modules import Function
from auditor.project.meaning.sites import last_name
from auditor.project.shapes.name_bindings import FILLING
from auditor.source.nodes import walk


def lines_without_a_note(
    function: Function, acquire: ast.Call, ends: Set[str], followed: Followed
) -> set[int]:
    """Of its returns, unless it always answers that there is nothing. `ends` are the names of what gives back
    to the pool."""
    tests = [each.test for each in function.statements if isinstance(each, ast.If)]
    named = set() if _is_in_a_loop(function, acquire) else _names_of(function, acquire)
    denied = any(_says_that_there_is_none(node, acquire, named) for test in tests for node in walk(test))
    denied = denied or any(getattr(test, "id", "") in named for test in tests)
    answers = [node.value for node in function.statements if isinstance(node, ast.Return)]
    tells = any(value is not None and ast.unparse(value) not in NOTHING for value in answers)
    if not denied or not tells or any(last_name(call) in ends for call in function.calls):
        return set()
    graph, roots = function.graph, {function.owner, *function.parameters}
    left = [
        (node, shortest_path(graph, followed.solution, node, held))
        for loss, node, held in followed.endings.lost
        if loss is Loss.RETURN
        and not _grants(graph.ops[node])
        and not _says_where(function, acquire, graph.ops[node], ends)
    ]
    return {
        graph.ops[node].at.lineno  # type: ignore[attr-defined]  # a return statement
        for node, path in left
        if not fills([graph.ops[station.node] for station in path], roots)
    }


def _names_of(function: Function, acquire: ast.Call) -> set[str]:
    """`got` of `got = budget.take(n)`."""
    given = assignments(function)
    return {target.id for target, value in given if value is acquire and isinstance(target, ast.Name)}


def _is_in_a_loop(function: Function, acquire: ast.Call) -> bool:
    """Of what is taken for each of several, the answer may say for which."""
    loops = (node for node in function.statements if isinstance(node, ast.For | ast.AsyncFor | ast.While))
    return any(node is acquire for loop in loops for node in walk(loop))


def _says_that_there_is_none(test: ast.AST, acquire: ast.Call, named: Set[str]) -> bool:
    """`not budget.take(n)`, and `not got`, `got is None` of `got = budget.take(n)`."""
    match test:
        case (
            ast.UnaryOp(op=ast.Not(), operand=asked)
            | ast.Compare(left=asked, ops=[ast.Is() | ast.Eq()], comparators=[ast.Constant(value=None | 0)])
        ):
            return asked is acquire or getattr(asked, "id", "") in named
    return False


def _says_where(function: Function, acquire: ast.Call, way_out: Op, ends: Set[str]) -> bool:
    """`if not self.budgets[url].take(n): return None` and `return url`: whoever asked for `n` knows from then
    on which budget has it, and another method of the object gives it back there."""
    known = {each.id for given in acquire.args for each in walk(given) if isinstance(each, ast.Name)}
    answer = getattr(way_out.at, "value", None)
    found = _keys_of(function, acquire.func)
    if not isinstance(answer, ast.expr) or not known <= {*function.parameters} or function.cls is None:
        return False
    told = {each.id for each in walk(answer) if isinstance(each, ast.Name)}
    others = (each for each in function.cls.methods.values() if each is not function)
    return not told.isdisjoint(found) and any(
        last_name(call) in ends and _keys_of(other, call.func) for other in others for call in other.calls
    )


def _keys_of(function: Function, asked: ast.expr) -> set[str]:
    """`url` of `self.budgets[url].take`, and of `budget.take` where `budget = self.budgets[url]`."""
    owner = asked.value if isinstance(asked, ast.Attribute) else asked
    values = [owner, *(given_to(function, owner.id) if isinstance(owner, ast.Name) else ())]
    return {
        each.slice.id
        for value in values
        for each in walk(value)
        if isinstance(each, ast.Subscript) and isinstance(each.slice, ast.Name)
    }


def lines_with_its_key(function: Function, acquire: ast.Call, ends: Set[str], followed: Followed) -> set[int]:
    """Of the ways out on which a record says of whom it was taken: `slots = self.nodes[node]`, and
    `self.flying[number] = Transfer(region, node)`. Another method gives it back by that, `self.nodes[
    transfer.node].give()`."""
    keys = _keys_of(function, acquire.func)
    if not keys or function.cls is None or not _given_back_by(keys, function, ends):
        return set()
    graph, own = function.graph, function.owner
    noting = {
        target
        for each in function.statements
        if isinstance(each, ast.Assign) and _tells(each.value, keys)
        for target in each.targets
    }
    ways: dict[bool, set[int]] = {True: set(), False: set()}
    for _, node, held in followed.endings.lost:
        path = (graph.ops[station.node] for station in shortest_path(graph, followed.solution, node, held))
        noted = any(isinstance(op, Store) and op.target[0] == own and op.at in noting for op in path)
        ways[noted].add(getattr(graph.ops[node].at, "lineno", 0))
    return ways[True] - ways[False]


def _tells(value: ast.expr, keys: Set[str]) -> bool:
    """`Transfer(region, node)`"""
    told = [*value.args, *(each.value for each in value.keywords)] if isinstance(value, ast.Call) else []
    return any(isinstance(each, ast.Name) and each.id in keys for each in told)


def _given_back_by(keys: Set[str], function: Function, ends: Set[str]) -> bool:
    """`self.nodes[transfer.node].give()` in another method of the class."""
    assert function.cls is not None
    return any(
        last_name(call) in ends
        and isinstance(each, ast.Subscript)
        and getattr(each.slice, "attr", "") in keys
        for method in function.cls.methods.values()
        if method is not function
        for call in method.calls
        for each in walk(call.func)
    )


def lost_with_what_says_it(
    function: Function, acquired: Acquisition, ends: Set[str], endings: Endings, leaks: Sequence[Leak]
) -> tuple[Leak, ...]:
    """`media = await loader.load(name, size)`, an object made for this function, that says how much was taken
    for it: nobody knows that who has not the object. It has to be kept on other ways, by which it is owed."""
    lies_in_it = acquired.fresh and all(len(place) > 1 for place in acquired.places)
    if acquired.value is not Value.AMOUNT or acquired.handle is not Handle.RESULT or not lies_in_it:
        return ()
    if acquired.recorded or not (endings.stored or endings.kept) or endings.released:
        return ()
    if any(last_name(call) in ends for call in function.calls):
        return ()  # `budget.refund(size)`, by the size that it was loaded with
    return tuple(leak for leak in leaks if leak.loss is Loss.RETURN)


def _grants(op: Op) -> bool:
    """`return True`: whoever asked knows that he has it."""
    answer = getattr(op.at, "value", None)
    return isinstance(answer, ast.Constant) and answer.value is True


def fills(way: Sequence[Op], roots: Set[str | None]) -> bool:
    """Something is put into the object, or into what the function was told."""
    return any(
        (isinstance(op, Store | InPlace) and len(op.target) > 1 and op.target[0] in roots)
        or (
            isinstance(op, Call)
            and op.method in FILLING
            and op.receiver is not None
            and op.receiver[0] in roots
        )
        for op in way
    )
