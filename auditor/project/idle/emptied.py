"""Lists of a pool that go back into its store as a whole: `self.idle.extend(self.set_aside)`, or one after
the other after `parked, self.set_aside = self.set_aside, []`."""

import ast
from collections.abc import Iterator

from auditor.project.code.bindings import given_to, gone_through, own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.full_at_first import AROUND

STEPS = 3


def emptied_into(work: FieldWork, thing: ast.expr, steps: int = STEPS) -> Iterator[str]:
    """The fields whose whole contents this is, or is one of."""
    match thing:
        case ast.Attribute():
            name = own_attribute(thing, work.method.owner or "")
            yield from [name] if name is not None and any(_is_emptied(work, name)) else []
        case ast.Call(func=func, args=[inner]) if last_part(func) in AROUND:
            yield from emptied_into(work, inner, steps)
        case ast.Name(id=name) if steps:
            parts = _gone_through_in_parts(work.method, name)
            for value in (*gone_through(work.method, name), *parts, *given_to(work.method, name)):
                yield from emptied_into(work, value, steps - 1)


def _gone_through_in_parts(function: Function, name: str) -> Iterator[ast.expr]:
    """`for until, port in self.quarantine:`"""
    for node in function.statements:
        match node:
            case ast.For(target=ast.Tuple(elts=elements), iter=over):
                if any(isinstance(each, ast.Name) and each.id == name for each in elements):
                    yield over


def _is_emptied(work: FieldWork, name: str) -> Iterator[bool]:
    """Whether the method leaves nothing in it."""
    own = work.method.owner or ""
    for node in work.method.nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=each, attr="clear")):
                yield own_attribute(each, own) == name
            case ast.Attribute(ctx=ast.Store()):
                yield own_attribute(node, own) == name
