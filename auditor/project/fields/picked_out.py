"""Containers that a method makes anew of some of what lies there, by their places or keys:

    keep = [i for i, weight in enumerate(self.weights) if weight <= limit]
    self.lanes = [self.lanes[i] for i in keep]          self.seats = {winner: self.seats[winner]}

Whoever says which are to stay has not ended the others."""

import ast
from collections.abc import Sequence

from auditor.project.code.bindings import assignments, given_to, own_attribute
from auditor.project.code.modules import Function


def picks_some(method: Function, node: ast.stmt, own: str, attribute: str) -> bool:
    """And surely not all of them in another order."""
    match node:
        case ast.Assign(
            targets=[target],
            value=ast.ListComp(generators=[ast.comprehension(iter=over, ifs=tests)]) as value,
        ):
            chosen = bool(tests) or _is_chosen(method, over)
        case ast.Assign(
            targets=[target],
            value=ast.DictComp(generators=[ast.comprehension(iter=ast.Name() as over)]) as value,
        ):
            chosen = over.id in method.parameters or _is_chosen(method, over)
        case ast.Assign(targets=[target], value=ast.Dict(values=[_]) | ast.List(elts=[_]) as value):
            chosen = True
        case _:
            return False
    return chosen and own_attribute(target, own) == attribute and is_of_its_own(value, own, attribute)


def is_of_its_own(value: ast.expr, own: str, attribute: str) -> bool:
    """It is made of what lies there under some keys or places."""
    match value:
        case (
            ast.ListComp(elt=each, generators=[ast.comprehension(target=ast.Name(id=at))])
            | ast.DictComp(value=each, generators=[ast.comprehension(target=ast.Name(id=at))])
        ):
            return _is_one(each, own, attribute, at)
        case ast.Dict(values=[_, *_] as parts) | ast.List(elts=[_, *_] as parts):
            return all(_is_one(each, own, attribute) for each in parts)
    return False


def _is_one(each: ast.expr, own: str, attribute: str, at: str = "") -> bool:
    """`self.lanes[i]`, with `at` under that name."""
    match each:
        case ast.Subscript(value=whole, slice=key) if not isinstance(key, ast.Slice):
            return own_attribute(whole, own) == attribute and at in ("", getattr(key, "id", ""))
    return False


def _is_chosen(method: Function, over: ast.expr) -> bool:
    """By a filter, or by a cut, and not by an order alone."""
    given: Sequence[ast.expr] = list(given_to(method, over.id)) if isinstance(over, ast.Name) else [over]
    return bool(given) and all(_chooses(each) for each in given)


def _chooses(value: ast.expr) -> bool:
    match value:
        case ast.ListComp(generators=each) | ast.SetComp(generators=each) | ast.GeneratorExp(generators=each):
            return any(one.ifs for one in each)
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
            return lower is not None or upper is not None
    return False


def is_made_of_its_own(method: Function, store: ast.AST, attribute: str) -> bool:
    """What is put there at this place: those that stay are no loss, and who goes is asked by the text."""
    own = method.owner or ""
    return any(
        own_attribute(target, own) == attribute and is_of_its_own(value, own, attribute)
        for target, value in assignments(method)
        if value.lineno == getattr(store, "lineno", 0)
    )
