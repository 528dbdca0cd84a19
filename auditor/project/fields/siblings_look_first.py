"""Fields of a given object that a method called like them fills each time, where one beside it looks first:

    def overlay(self, frame, text):
        if frame.overlay is None:
            frame.overlay = self.pool.begin()

    def legend(self, frame, entries):
        frame.legend = self.pool.begin()

Who wrote the first knows that such methods are called more than once for an object."""

import ast
from collections.abc import Sequence

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling, asked_for, fillings
from auditor.project.fields.reckoning import lent_alike
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk


def siblings_look_first(filling: Filling, call: ast.Call, family: Sequence[Function]) -> bool:
    method = filling.method
    if filling.key is not None or not _is_called_like(method, filling.field):
        return False
    return any(_looks_first(each, filling.field, call) for each in family if each is not method)


def _is_called_like(method: Function, field: str) -> bool:
    """`legend`, `set_legend` and `draw_legend` of `.legend`."""
    return split(method.name)[-len(split(field)) :] == split(field)


def _looks_first(method: Function, field: str, call: ast.Call) -> bool:
    for owner in method.parameters[1:]:
        for node in method.statements:
            asked = asked_for(node.test) if isinstance(node, ast.If) else None
            other = own_attribute(asked, owner) if isinstance(asked, ast.expr) else None
            if other is None or other == field or not _is_called_like(method, other):
                continue
            inside = {id(inner) for inner in walk(node)}
            for each in fillings(method, owner, other):
                if id(each.statement) in inside and lent_alike(each, call):
                    return True
    return False
