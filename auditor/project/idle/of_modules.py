"""Pools of a module's functions, seen as classes: what their own bodies lose is asked as of any pool."""

import ast

from auditor.project.code.modules import Class, Function, Module
from auditor.project.code.shared_state import is_store, name_of, sharing


def pool_of_module(module: Module) -> Class | None:
    """The functions that work with containers of the module, as methods of an object that has these."""
    plain = [each for each in module.functions.values() if each.cls is None and each.parent is None]
    plain = [each for each in plain if isinstance(each.node, ast.FunctionDef | ast.AsyncFunctionDef)]
    stores = {name for name, value in module.assigned.items() if _is_container(value)}
    kept = {name for name in stores if sum(_mentions(each, name) for each in plain) > 1}
    kept = {name for name in kept if not any(name in cls.text for cls in module.classes.values())}
    sharers = [each for each in plain if any(_mentions(each, name) for name in kept)]
    if len(sharers) < 2:
        return None
    return sharing(module, name_of(module), module.tree.body, sharers, kept).cls


def _is_container(value: ast.expr) -> bool:
    return is_store(value) and not isinstance(value, ast.Constant)


def _mentions(function: Function, name: str) -> bool:
    return any(node.id == name for node in function.of_kind(ast.Name))
