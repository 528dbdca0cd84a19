"""Looks at what lies in a container that leave everything there where it lies:

jump = abs(frame.luma - self.history[-1].luma) if self.history else 0.0
return sum(frame.luma for frame in self.history) / len(self.history)
"""

import ast

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.in_others import Uses

SUMMING = frozenset({"sum", "any", "all", "max", "min"})
"""What they make of a generator of parts is one of these parts, or less."""


class Looks:
    """Of one method, whose own methods may do more."""

    def __init__(self, method: Function, attribute: str) -> None:
        self.method = method
        self.uses = Uses(method)
        own, cls = method.owner or "", method.cls
        called = {own_attribute(call.func, own) for call in method.calls}
        family = cls.methods.values() if cls is not None else ()
        self.alone = not any(each.name in called and f".{attribute}" in each.text for each in family)

    def only_looks(self, node: ast.expr) -> bool:
        """What is read there is a number of it, or is compared, or whether there is anything."""
        parent = self.uses.parents.get(id(node))
        match parent:
            case _ if not self.alone:
                return False
            case ast.Attribute(attr="maxlen") | ast.Subscript(slice=ast.Slice()):
                return False  # who asks whether it is full may make room
            case ast.IfExp(test=test) | ast.If(test=test) if test is node:
                return True
            case ast.For(target=ast.Name(id=name)) | ast.comprehension(target=ast.Name(id=name)):
                return all(map(self._is_a_number_of_it, self._reads(name)))
        return self.uses.is_worked_with(node)

    def _reads(self, name: str) -> list[ast.Name]:
        named = (node for node in self.method.nodes if isinstance(node, ast.Name) and node.id == name)
        return [node for node in named if isinstance(node.ctx, ast.Load)]

    def _is_a_number_of_it(self, element: ast.Name) -> bool:
        """`total += frame.luma`, `sum(frame.luma for ...)`"""
        part = self.uses.parents.get(id(element))
        if not isinstance(part, ast.Attribute | ast.Subscript):
            return False
        parent = self.uses.parents.get(id(part))
        match parent:
            case ast.AugAssign(target=ast.Name(id=total), op=ast.Add()):
                return all(isinstance(given, ast.Constant) for given in given_to(self.method, total))
            case ast.GeneratorExp(elt=made) if made is part:
                around = self.uses.parents.get(id(parent))
                return isinstance(around, ast.Call) and getattr(around.func, "id", "") in SUMMING
        return isinstance(parent, ast.Compare | ast.BinOp | ast.UnaryOp)
