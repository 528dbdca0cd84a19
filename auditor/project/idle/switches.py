"""Conditions on a switch of the object, such as a pool that is being closed."""

import ast

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.idle.stock import Stock


def is_switch(stock: Stock, function: Function, test: ast.expr) -> bool:
    """`if self.closing:`, `if self._paused.is_set():`: of one thing as of another."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return is_switch(stock, function, inner)
        case ast.BoolOp(values=values):
            return all(is_switch(stock, function, each) for each in values)
        case ast.Call(func=ast.Attribute(value=event, attr="is_set"), args=[]):
            return own_attribute(event, function.owner or "") is not None
    field = own_attribute(test, function.owner or "")
    given = [
        value
        for method in stock.cls.methods.values()
        for at, value in assignments(method)
        if field is not None and own_attribute(at, method.owner or "") == field
    ]
    return bool(given) and all(isinstance(getattr(value, "value", None), bool) for value in given)
