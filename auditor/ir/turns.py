"""Turns of counted loops that differ: the first, where `i == 0` and its kin answer otherwise than ever after;
and a process's own among those of all ranks.
"""

import ast

from auditor.ir.conditions import Condition, called_name, condition, is_length
from auditor.source.nodes import walk

FLAG = "first~"
"""Begins the name of the hidden flag that is true while a loop is in its first turn."""
OWN = "own~"
"""Begins the name of the hidden flag that is true once a loop has had this process's own turn."""


def first_turn_tests(loop: ast.For | ast.AsyncFor) -> dict[str, bool]:
    """Keys of conditions in the body that tell the first turn from the later ones, with their truth in it."""
    counter = _counter(loop)
    nodes = inside(loop)
    if counter is None or is_written(counter, nodes):
        return {}
    answers = {f"{counter} == 0": True, f"{counter} < 1": True, f"{counter} > 0": False, counter: False}
    keys = {each.key for each in asked(nodes)}
    return {key: truth for key, truth in answers.items() if key in keys}


def ruled_out_at_first(loop: ast.For | ast.AsyncFor) -> list[Condition]:
    """Tests in the body that are false in the first turn, and may be either later: nothing that is counted
    from 0 is more than a rank or a length then."""
    counter = _counter(loop)
    nodes = inside(loop)
    if counter is None or is_written(counter, nodes):
        return []
    sizes = {ast.unparse(node) for node in nodes if _is_rank(node) or is_length(node)}
    ruled_out = {key for size in sizes for key in (f"{counter} > {size}", f"{size} < {counter}")}
    return [each for each in asked(nodes) if each.key in ruled_out]


def inside(loop: ast.For | ast.AsyncFor) -> list[ast.AST]:
    """All nodes of its body."""
    return [node for statement in loop.body for node in walk(statement)]


def asked(nodes: list[ast.AST]) -> list[Condition]:
    """The conditions that branches among them ask."""
    tests = (node.test for node in nodes if isinstance(node, (ast.If, ast.IfExp)))
    found = [condition(part) for test in tests for part in _parts(test)]
    return [each for each in found if each is not None]


def is_written(name: str, nodes: list[ast.AST]) -> bool:
    """Whether any of them binds this name to something else."""
    return any(isinstance(node, ast.Name) and node.id == name and _written(node) for node in nodes)


def own_turn(loop: ast.For | ast.AsyncFor) -> tuple[ast.If, bool] | None:
    """`if i == rank:` in a loop over all ranks, and what it answers in the process's own turn: there is one,
    and the loop does not end before it. None where that turn leaves the loop: it looks for somebody.
    """
    counter = _counter(loop)
    for statement in loop.body if counter is not None else ():
        match statement:
            case ast.If(
                test=ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as asked], comparators=[right])
            ):
                equal = isinstance(asked, ast.Eq)
                branch = statement.body if equal else statement.orelse
                inside = [node for each in branch for node in walk(each)]
                leaves = any(isinstance(node, (ast.Break, ast.Return, ast.Raise)) for node in inside)
                if not leaves and _are_counter_and_rank(left, right, counter):
                    return statement, equal
    return None


def _are_counter_and_rank(left: ast.expr, right: ast.expr, counter: str | None) -> bool:
    return any(
        isinstance(one, ast.Name) and one.id == counter and _is_rank(other)
        for one, other in ((left, right), (right, left))
    )


RANKS = frozenset({"world", "world_size", "ring_size", "ranks", "num_ranks", "n_ranks", "nranks"})
"""Names of how many ranks there are: one at least."""


def counts_ranks(over: ast.expr) -> bool:
    """`range(world_size)`, and not `range(world_size - 1)`: there is a first turn. So there is of a loop over
    `("front", "back")`."""
    match over:
        case ast.Tuple(elts=[_, *_] as elements) | ast.List(elts=[_, *_] as elements):
            return all(isinstance(each, ast.Constant) for each in elements)
        case ast.Call(func=ast.Name(id="range"), args=[ast.Name() | ast.Attribute() as limit]):
            return called_name(limit).lower().lstrip("_") in RANKS
    return False


def _is_rank(node: ast.AST) -> bool:
    named = isinstance(node, ast.Name | ast.Attribute)
    return named and "rank" in called_name(node).lower().split("_")  # type: ignore[arg-type]


def _counter(loop: ast.For | ast.AsyncFor) -> str | None:
    """The name that is 0 in the first turn: `for i in range(n)`, `for i, x in enumerate(xs)`."""
    match loop.target, loop.iter:
        case ast.Name(id=name), ast.Call(func=ast.Name(id="range"), args=[_] | [ast.Constant(value=0), *_]):
            return name
        case (
            ast.Tuple(elts=[ast.Name(id=name), _]),
            ast.Call(func=ast.Name(id="enumerate"), args=[_], keywords=[]),
        ):
            return name
    return None


def _parts(test: ast.expr) -> list[ast.expr]:
    """The tests that `and`, `or` and `not` are made of."""
    match test:
        case ast.BoolOp(values=values):
            return [part for value in values for part in _parts(value)]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _parts(operand)
    return [test]


def _written(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)
