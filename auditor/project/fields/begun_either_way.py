"""Fields that may say one thing or the other wherever there is a lease, for so says the function that takes
it: `self.loud = loud` beside `self.row = self.rows.take()`. Who asks them at the end says nothing of it."""

import ast
from collections.abc import Sequence

from auditor.ir.ops import Assume, Path
from auditor.ir.scope import parameters_of
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.exits import PROMISING
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk


def may_be_begun_with(begun: Function, call: ast.Call, field: str, answers: Sequence[Assume]) -> bool:
    """It sets the field once, to something that it is told and that has nothing to do with the call, or to
    what gives these answers."""
    own = begun.owner or ""
    given = [(target, value) for target, value in assignments(begun) if own_attribute(target, own) == field]
    written = [
        node
        for node in begun.nodes
        if isinstance(node, ast.Attribute) and node.attr == field and not isinstance(node.ctx, ast.Load)
    ]
    if len(given) != 1 or len(written) != 1 or not PROMISING.isdisjoint(split(field)):
        return False
    value = given[0][1]
    if not _always(begun, value):
        return False
    told = {node.id for node in walk(value) if isinstance(node, ast.Name)}
    if told:
        return told <= set(parameters_of(begun.node)) - {own} and not _is_asked(begun, call, value, told)
    return bool(answers) and all(_is_answered(each, value, (own, f".{field}")) for each in answers)


def _always(begun: Function, value: ast.expr) -> bool:
    """A statement of its own, and no choice."""
    body = begun.node.body if isinstance(begun.node.body, list) else []
    return any(getattr(each, "value", None) is value for each in body)


def _is_asked(begun: Function, call: ast.Call, value: ast.expr, told: set[str]) -> bool:
    """Elsewhere than in the value: whether, or how much, is taken may depend on it."""
    inside = {id(node) for node in walk(value)}
    choices = [getattr(node, way, None) for node in begun.nodes for way in ("test", "subject", "iter")]
    taking = [each for each in begun.statements if getattr(each, "value", None) is not None]
    return any(
        isinstance(part, ast.Name) and part.id in told and id(part) not in inside
        for node in (*choices, *(each for each in taking if call in list(walk(each))))
        if isinstance(node, ast.AST) and not _is_one_of_several(node, told)
        for part in walk(node)
    )


def _is_one_of_several(test: ast.AST, told: set[str]) -> bool:
    """`if capture or self.replays:` lets it be taken where `capture` is false."""
    match test:
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(not any(getattr(part, "id", "") in told for part in walk(each)) for each in values)
    return False


def _is_answered(answer: Assume, value: ast.expr, field: Path) -> bool:
    """`[]`, `""` and `0` are false, and no None."""
    constant = value.value if isinstance(value, ast.Constant) else getattr(value, "elts", None)
    if not isinstance(value, ast.Constant | ast.List | ast.Dict) or answer.subject != field:
        return False
    says = {"truth": bool(constant), "none": isinstance(value, ast.Constant) and value.value is None}
    return says.get(answer.kind) is answer.value
