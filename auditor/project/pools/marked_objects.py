"""Pools that mark an object of their own as taken, and objects that take the mark back themselves.

`slot = next(s for s in self.slots if s.count == 0)`, `slot.count = 1`, `return slot`; and `slot.let_go()`,
which counts down. The pool has no method that is given it back."""

import ast
from collections.abc import Iterator, Set

from auditor.flow.effects import Handle
from auditor.project.code.bindings import assignments
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.pools.ended_objects import may_end
from auditor.project.pools.halves import LENDING, Half, Pair
from auditor.project.pools.lent_objects import element_class
from auditor.project.shapes.markings import is_nothing
from auditor.protocols.vocabulary import Name


def marked_objects(model: ClassModel, cls: Class, paired: Set[Function]) -> Iterator[Pair]:
    for _, taker in sorted(cls.methods.items()):
        if taker in paired or taker.name.startswith("__") or LENDING & set(taker.decorators):
            continue
        fields = set(_marked(taker))
        lent = _lent(model, cls, taker) if fields else None
        ends = _ends(lent, fields) if lent is not None and lent is not cls else []
        if lent is not None and ends:
            half = Half(taker, Name("acquire", frozenset()), by_shape=True)
            back = (Half(end, Name("release", frozenset()), Handle.RECEIVER) for end in ends)
            yield Pair(lent.name, cls, (half,), tuple(back))  # `slot.hold()` begins what these end, too


def _marked(taker: Function) -> Iterator[str]:
    """`count` of `if s.count == 0: s.count = 1; return s`: of one that was looked for by it."""
    returned = {
        node.value.id
        for node in taker.statements
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    returned -= set(taker.parameters)
    raised = [
        node.target
        for node in taker.statements
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
    ]
    for target in (*(to for to, value in assignments(taker) if not is_nothing(value)), *raised):
        match target:
            case ast.Attribute(value=ast.Name(id=name), attr=field) if name in returned and _is_asked(
                taker, field
            ):
                yield field


def _is_asked(taker: Function, field: str) -> bool:
    """`s.count == 0`, `s.owner is None`, `not s.busy`, of each that it goes over."""
    asked = [node.test for node in taker.nodes if isinstance(node, ast.If)]
    asked += [test for node in taker.nodes if isinstance(node, ast.comprehension) for test in node.ifs]
    return any(_is_free(test, field) for test in asked)


def _is_free(test: ast.expr, field: str) -> bool:
    match test:
        case ast.Compare(left=ast.Attribute(attr=attr), ops=[ast.Eq() | ast.Is()], comparators=[value]):
            return attr == field and is_nothing(value)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(attr=attr)):
            return attr == field
        case ast.BoolOp(op=ast.And(), values=values):
            return any(_is_free(each, field) for each in values)
    return False


def _lent(model: ClassModel, pool: Class, taker: Function) -> Class | None:
    """The class of what lies in the fields that it goes over."""
    read = {node.attr for node in taker.nodes if isinstance(node, ast.Attribute)}
    return next((cls for name in sorted(read) if (cls := element_class(model, pool, name)) is not None), None)


def _ends(lent: Class, fields: Set[str]) -> list[Function]:
    """Its methods that are told nothing, and after which the mark is down."""
    if "__del__" in lent.methods:
        return []
    methods = (method for name, method in sorted(lent.methods.items()) if not name.startswith("__"))
    return [method for method in methods if may_end(method, named=False) and _takes_down(method, fields)]


def _takes_down(method: Function, fields: Set[str]) -> bool:
    lowered = (
        node.target
        for node in method.statements
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub)
    )
    cleared = (target for target, value in assignments(method) if is_nothing(value))
    return any(
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == method.owner
        and target.attr in fields
        for target in (*lowered, *cleared)
    )
