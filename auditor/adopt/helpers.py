"""Functions beside a module that make temporaries for it, and whether its pool can be lent to them.

Only functions of the module's own file are looked at, that its forward path calls by their names.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from auditor.adopt.draft import Draft, Refused
from auditor.adopt.forward_path import forward_path
from auditor.adopt.inheritance import MIXIN
from auditor.adopt.uses import Function
from auditor.source.imports import dotted_text

LEASE = "_lease_tensor"
PARAMETER = "lease_tensor"
PLAIN = f"{MIXIN}().{LEASE}"
"""The default: a mixin whose switch was never turned on gives plain torch memory."""

_TRANSPARENT = frozenset(("beartype", "no_grad", "inference_mode"))
"""Decorators that hand every argument on and keep none."""


@dataclass(frozen=True)
class Call:
    """A call of a helper in a method, which calls its object `me`."""

    helper: Function
    call: ast.Call
    me: str


def helpers(draft: Draft, owner: ast.ClassDef) -> list[Function]:
    """The functions of the file that the forward path of a class calls, in the order of the source."""
    found = {each.helper.name: each.helper for each in calls_of_helpers(draft, owner)}
    return sorted(found.values(), key=lambda each: each.lineno)


def calls_of_helpers(draft: Draft, owner: ast.ClassDef) -> Iterator[Call]:
    """Each call of such a function, where the name can stand for nothing else."""
    functions = _functions(draft.tree)
    for method in forward_path(owner):
        if not method.args.args or any(dotted_text(d) == "staticmethod" for d in method.decorator_list):
            continue
        own = _bound_in(method)
        for node in ast.walk(method):
            match node:
                case ast.Call(func=ast.Name(id=name)) if name in functions and name not in own:
                    yield Call(functions[name], node, method.args.args[0].arg)


def unlent(draft: Draft, owner: ast.ClassDef) -> list[Call]:
    """The calls that do not lend the pool to a function which takes one."""
    return [
        each
        for each in calls_of_helpers(draft, owner)
        if _takes_a_lender(each.helper) and PARAMETER not in {word.arg for word in each.call.keywords}
    ]


def unready(draft: Draft, owner: ast.ClassDef) -> list[Function]:
    """The functions that lease already and have no parameter for it yet."""
    return [each for each in helpers(draft, owner) if not _takes_a_lender(each) and _asks(each)]


def lender_of_helper(helper: Function) -> str:
    """What it asks for a tensor. Raises Refused where it cannot be given a parameter."""
    refuse_unfinished(helper)
    for decorator in helper.decorator_list:
        name = dotted_text(decorator.func if isinstance(decorator, ast.Call) else decorator) or "a decorator"
        if name.rpartition(".")[2] not in _TRANSPARENT:
            raise Refused(f"`{helper.name}` is wrapped by `{name}`, which may keep or count its arguments")
    if not (helper.args.args or helper.args.kwonlyargs or helper.args.vararg or helper.args.posonlyargs):
        raise Refused(f"`{helper.name}` has no parameter after which another could stand")
    if not _takes_a_lender(helper) and PARAMETER in _bound_in(helper):
        raise Refused(f"`{helper.name}` has a `{PARAMETER}` of its own")
    return PARAMETER


def refuse_unfinished(function: Function) -> None:
    """Raises Refused for what may be left in its middle for good."""
    if isinstance(function, ast.AsyncFunctionDef):
        raise Refused(f"`{function.name}` is asynchronous")
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)):
        raise Refused(f"`{function.name}` is a generator, which may never be finished")


def _functions(tree: ast.Module) -> dict[str, Function]:
    """The functions of a file by the names that stand for them and for nothing else."""
    found = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = [each.name for each in found]
    others = {
        name
        for each in tree.body
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for name in _names_bound(each)
    }
    return {each.name: each for each in found if names.count(each.name) == 1 and each.name not in others}


def _bound_in(function: Function) -> set[str]:
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return arguments | {name for each in function.body for name in _names_bound(each)}


def _names_bound(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                yield name
            case ast.alias(name=name, asname=known_as):
                yield (known_as or name).partition(".")[0]
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def _takes_a_lender(helper: Function) -> bool:
    pairs = zip(helper.args.kwonlyargs, helper.args.kw_defaults, strict=True)
    return any(
        each.arg == PARAMETER and default is not None and ast.unparse(default) == PLAIN
        for each, default in pairs
    )


def _asks(helper: Function) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == PARAMETER
        for node in ast.walk(helper)
    )
