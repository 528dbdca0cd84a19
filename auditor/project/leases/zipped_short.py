"""Lists of leases that a loop gives back, or notes, beside another list that may be the shorter one:
`for lane, task in zip(lanes, tasks)` ends there, and the lanes behind it are lost."""

import ast
from collections.abc import Iterator, Set

from auditor.project.code.bindings import assignments, given_to
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import names_in
from auditor.project.leases.stopped_early import listed_in
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk


def zipped_short(calls: Calls, function: Function, call: ast.Call, ends: Set[str]) -> Iterator[ast.For]:
    """The one loop that gives them back, or notes each, where nothing says that the other list is as long."""
    name = listed_in(function, call)
    loops = [
        (node, zipped)
        for node in function.statements
        if isinstance(node, ast.For) and (zipped := _zipped(node.iter)) is not None and _first(zipped) == name
    ]
    if not name or len(loops) != 1:
        return
    ((loop, zipped),) = loops
    keeps = _notes(loop) and not _are_counted_by_callers(calls, function)
    if not (_gives_back(loop, ends) or keeps) or _is_spoken_of_behind(function, loop, name):
        return
    others = zipped.args[1:]
    if _is_longer(function, name, others) or not _are_linked(function, name, others):
        yield loop


def _zipped(over: ast.expr) -> ast.Call | None:
    """Not `zip(..., strict=True)`, which would complain."""
    match over:
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
            return _zipped(inner)
        case ast.Call(func=ast.Name(id="zip"), args=[_, _, *_], keywords=[]):
            return over
    return None


def _first(zipped: ast.Call) -> str:
    return getattr(zipped.args[0], "id", "")


def _turn(loop: ast.For) -> str:
    """`lane`"""
    target = loop.target
    if isinstance(target, ast.Tuple) and isinstance(target.elts[-1], ast.Tuple):
        target = target.elts[-1]  # `for number, (lane, task) in enumerate(zip(lanes, tasks))`
    each = target.elts[0] if isinstance(target, ast.Tuple) else target
    return each.id if isinstance(each, ast.Name) else ""


def _gives_back(loop: ast.For, ends: Set[str]) -> bool:
    return any(
        isinstance(node, ast.Call) and last_name(node) in ends and _turn(loop) in names_in(node)
        for part in loop.body
        for node in walk(part)
    )


def _notes(loop: ast.For) -> bool:
    """`self.latest[task.id] = lane`, `task.lane = lane`, in every turn."""
    for statement in loop.body:
        match statement:
            case ast.Assign(targets=[ast.Subscript() | ast.Attribute()], value=ast.Name(id=noted)):
                if noted == _turn(loop):
                    return True
    return False


def _are_counted_by_callers(calls: Calls, function: Function) -> bool:
    """`self.fill(batches, len(batches))`: those know how many there are, or may."""
    return any(
        last_name(call) == function.name and "len(" in ast.unparse(call)
        for module in calls.model.project.parsed()
        if f"{function.name}(" in module.text
        for caller in module.by_node.values()
        for call in caller.calls
    )


def _is_spoken_of_behind(function: Function, loop: ast.For, name: str) -> bool:
    last = loop.end_lineno or loop.lineno
    return any(node.id == name and node.lineno > last for node in function.of_kind(ast.Name))


def _is_longer(function: Function, name: str, others: list[ast.expr]) -> bool:
    """`lanes = [pool.claim() for _ in range(len(tasks) + 1)]`"""
    counts = (node for made in given_to(function, name) for node in walk(made) if isinstance(node, ast.BinOp))
    told = {ast.unparse(each) for each in others}
    return any(
        isinstance(count.op, ast.Add)
        and isinstance(count.left, ast.Call)
        and last_name(count.left) == "len"
        and ast.unparse(count.left.args[0]) in told
        and isinstance(count.right, ast.Constant)
        for count in counts
    )


def _are_linked(function: Function, name: str, others: list[ast.expr]) -> bool:
    """Something of the one has to do with something of the other: `width = len(tasks)`, or a question about
    both. What a field or a module's name says of them is not known."""
    own = _behind(function, {name})
    told = _behind(function, set().union(*map(names_in, others)))
    tests = [node.test for node in function.nodes if isinstance(node, ast.If | ast.While | ast.Assert)]
    both = any(own & names_in(test) and told & names_in(test) for test in tests)
    return bool(own & told) or both or not own | told <= _local(function)


def _behind(function: Function, names: Set[str]) -> set[str]:
    """These, and what they were made of."""
    found = set(names)
    for _ in range(len(list(assignments(function))) + 1):
        more = {
            part
            for target, value in assignments(function)
            if names_in(target) & found
            for part in names_in(value)
        }
        if more <= found:
            break
        found |= more
    return found - {function.owner, "range", "len", "zip", "list", "min", "max"}


def _local(function: Function) -> set[str]:
    """Parameters, and what is bound here."""
    bound = {node.id for node in function.of_kind(ast.Name) if isinstance(node.ctx, ast.Store)}
    return bound | set(function.parameters)
