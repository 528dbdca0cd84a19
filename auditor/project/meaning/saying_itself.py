"""Methods that only say what their object has: `result.to_receipt()`, whose body is one `return` of a record
made of the object's own fields. Nobody puts a release behind the failure of such a call."""

import ast

from auditor.project.code.calls import Calls
from auditor.project.code.class_model import ClassModel
from auditor.project.code.kept_as_told import fields_of
from auditor.project.code.modules import Class, Function
from auditor.source.nodes import is_docstring

MADE_OF = frozenset({"tuple", "list", "dict", "set", "frozenset", "len", "bool"})


def only_says_what_it_has(calls: Calls, function: Function, call: ast.Call) -> bool:
    """Of a call that means one method of the tree, and tells it nothing."""
    targets, constructed, _ = calls.targets(function, call)
    if constructed is not None or len(targets) != 1 or call.args or call.keywords:
        return False
    method = targets[0]
    return method.is_method and not calls.guessed(function, call) and _says(calls.model, method)


def _says(model: ClassModel, method: Function) -> bool:
    body = method.node.body if isinstance(method.node, ast.FunctionDef) else []
    match [each for each in body if not is_docstring(each)]:
        case [ast.Return(value=ast.expr() as value)]:
            return _is_plain(model, method, value)
    return False


def _is_plain(model: ClassModel, method: Function, value: ast.expr) -> bool:
    match value:
        case ast.Constant() | ast.Name():
            return True
        case ast.Attribute(value=ast.Name(id=owner)):
            return owner == method.owner
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(_is_plain(model, method, each) for each in parts)
        case ast.Call(func=func, args=args, keywords=keywords):
            parts = [*args, *(keyword.value for keyword in keywords)]
            made = isinstance(func, ast.Name) and (func.id in MADE_OF or _is_a_record(model, method, func))
            return made and all(_is_plain(model, method, each) for each in parts)
    return False


def _is_a_record(model: ClassModel, method: Function, func: ast.Name) -> bool:
    """A dataclass, or a named tuple, that does nothing when it is made."""
    made = model.callee(method, func)
    if not isinstance(made, Class) or not fields_of(model, made):
        return False
    return all(model.method(made, name) is None for name in ("__init__", "__post_init__", "__new__"))
