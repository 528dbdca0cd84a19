"""A store that is gone through for the best: `if best is None or each.size > best.size: best = each`, and
else `each` goes back. The best so far has to go back as well when a better one is found; so has what is kept
for want of a better one, `fallback = each`, when the next one is."""

import ast
from collections.abc import Sequence, Set

from auditor.project.code.bindings import given_to
from auditor.project.idle.setting import TakenHere
from auditor.source.nodes import walk

LEAVING = (ast.Break, ast.Return, ast.Raise, ast.Continue)


def best_passed_over(here: TakenHere) -> ast.Name | None:
    """The `best = each` by which the former one is in nobody's hands."""
    name = _name_of(here)
    for loop in here.loops if name else ():
        if (kept := _kept_for_want(loop, name)) is not None and _is_nothing_at_first(here, kept.id):
            return kept
        for choice in (each for each in walk(loop) if isinstance(each, ast.If)):
            best = _chosen(choice, name)
            if (
                best is not None
                and _is_nothing_at_first(here, best.id)
                and _forgets(loop, choice, name, best.id)
            ):
                return best
    return None


def _is_nothing_at_first(here: TakenHere, best: str) -> bool:
    given = given_to(here.function, best)
    return any(isinstance(value, ast.Constant) and value.value is None for value in given)


def _kept_for_want(loop: ast.AST, name: str) -> ast.Name | None:
    """`fallback` of `fallback = each` at the end of a turn, of which only ways out of the loop speak."""
    body: Sequence[ast.stmt] = getattr(loop, "body", [])
    match _without_marks(body):
        case [*before, ast.Assign(targets=[ast.Name() as kept], value=ast.Name(id=given))]:
            pass
        case _:
            return None
    leaving = [each for each in before if isinstance(each, ast.If) and isinstance(each.body[-1], LEAVING)]
    out = {id(node) for each in leaving for part in each.body for node in walk(part)}
    marks = {id(node) for each in body if each not in before for node in walk(each)}
    loads = [node for node in walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    alone = all(id(node) in out | marks for node in loads if node.id == kept.id)
    return kept if given == name and leaving and alone else None


def _without_marks(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    """`fallback.refs = 1` behind `fallback = each`"""
    match body:
        case [
            *before,
            ast.Assign(targets=[ast.Name(id=kept)]) as keeping,
            ast.Assign(targets=[ast.Attribute(value=ast.Name(id=marked))], value=ast.Constant()),
        ] if kept == marked:
            return [*before, keeping]
    return body


def _name_of(here: TakenHere) -> str:
    for node in here.function.statements:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if value is here.take.shown:
                return name
    return ""


def _chosen(choice: ast.If, name: str) -> ast.Name | None:
    """`best`, of a condition that compares what was taken with what is known of the best."""
    if not any(_compares(each, name) for each in _alternatives(choice.test)):
        return None
    for node in choice.body:
        match node:
            case ast.Assign(targets=[ast.Name() as best], value=ast.Name(id=given)) if given == name:
                return best
    return None


def _alternatives(test: ast.expr) -> list[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]


def _compares(test: ast.expr, name: str) -> bool:
    match test:
        case ast.Compare(ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()]):
            return name in _read(test)
    return False


def _forgets(loop: ast.AST, choice: ast.If, name: str, best: str) -> bool:
    """Nothing else in the loop has to do with the best, and with the other one only what is in its place."""
    if any(isinstance(node, LEAVING) for part in choice.body for node in walk(part)):
        return False
    asked = {id(node) for node in walk(choice.test)}
    noting = {id(node) for part in choice.body for node in walk(part) if isinstance(part, ast.Assign)}
    instead = {id(node) for part in choice.orelse for node in walk(part)}
    loads = [node for node in walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return all(id(node) in asked for node in loads if node.id == best) and all(
        id(node) in asked | noting | instead for node in loads if node.id == name
    )


def _read(node: ast.AST) -> Set[str]:
    return {each.id for each in walk(node) if isinstance(each, ast.Name)}
