"""Conditions on a switch of the object, such as a pool that is paused."""

import ast

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.idle.stock import Stock
from auditor.project.meaning.own_pools import ENDS


def is_switch(stock: Stock, function: Function, test: ast.expr) -> bool:
    """`if self.paused:`, `if self._draining.is_set():`: of one thing as of another. What the class closes for
    good nobody takes from again."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return is_switch(stock, function, inner)
        case ast.BoolOp(values=values):
            return all(is_switch(stock, function, each) for each in values)
        case ast.Call(func=ast.Attribute(value=event, attr="is_set"), args=[]):
            return own_attribute(event, function.owner or "") is not None
    field = own_attribute(test, function.owner or "")
    given = [
        (method.name, value)
        for method in stock.cls.methods.values()
        for at, value in assignments(method)
        if field is not None and own_attribute(at, method.owner or "") == field
    ]
    turned = all(isinstance(getattr(value, "value", None), bool) for _, value in given)
    return bool(given) and turned and not any(name in ENDS for name, _ in given)
