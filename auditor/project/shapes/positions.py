"""Places to which an object goes back, that whoever asks for one keeps himself:

    def mark(self):
        return self.top

    def rewind(self, mark):
        self.top = mark

What was taken from the object since is taken until then. The object counts on by itself in between; a field
that is only shown and set, as by `tell` and `seek`, is none."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import assigned_by, own_attribute
from auditor.project.code.modules import Function
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters


def positions(methods: Sequence[Function]) -> Iterator[tuple[Function, Function]]:
    """Who shows the place, and who is told it and goes back there."""
    shown = {each: fields for each in methods if (fields := _shown(each))}
    for ends in methods if shown else ():
        told = _set_from_told(ends)
        for begins, fields in shown.items():
            others = [each for each in methods if each not in (begins, ends)]
            if fields <= told and any(_counts_on(each, fields) for each in others):
                yield begins, ends


def _shown(method: Function) -> frozenset[str]:
    """`top` of `return self.top`, which is all that it does."""
    if own_parameters(method) or method.is_property or method.owner is None:
        return frozenset()
    body = method.body
    match body[-1:] if len(body) <= 2 else []:
        case [ast.Return(value=ast.Tuple(elts=parts))]:
            fields = [own_attribute(each, method.owner) for each in parts]
        case [ast.Return(value=ast.Attribute() as part)]:
            fields = [own_attribute(part, method.owner)]
        case _:
            return frozenset()
    docstring = len(body) == 1 or isinstance(getattr(body[0], "value", None), ast.Constant)
    named = [each for each in fields if each is not None]
    return frozenset(named) if docstring and len(named) == len(fields) else frozenset()


def _set_from_told(method: Function) -> frozenset[str]:
    """`self.top = mark`, `self.top, self.live = mark`"""
    told = own_parameters(method)
    if not told or method.owner is None:
        return frozenset()
    found: set[str] = set()
    for node in method.statements:
        for target, value in assigned_by(node):
            targets = target.elts if isinstance(target, ast.Tuple) else [target]
            source = value.value if isinstance(value, ast.Subscript) else value
            if isinstance(source, ast.Name) and source.id == told[0]:
                found |= {name for each in targets if (name := own_attribute(each, method.owner)) is not None}
    return frozenset(found)


def _counts_on(method: Function, fields: frozenset[str]) -> bool:
    """`self.top += size`, and something of it is handed out."""
    work = field_work(method)
    counted = any(name in fields and way > 0 for name, way in work.counted)
    return counted and any(not isinstance(value, ast.Constant) for value in work.returned)
