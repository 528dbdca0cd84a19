"""Whether an acquire hands out cleared memory: asked of the call, then of the signature, then of the body."""

import ast

from auditor.ir.ops import Call
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.source.nodes import walk

SAYING = ("zero", "clear", "init", "fill")
"""How parameters begin or go on that ask for cleared memory: `zero`, `zero_init`, `zero_initialize`."""

CLEARING = frozenset({"zeros", "ones", "full", "zero_", "fill_", "zeros_like", "ones_like", "full_like",
                      "new_zeros", "memset", "rand", "randn"})  # fmt: skip
CLEARED_BY_DEFAULT = frozenset({"_allocate_tensor", "_lease_tensor"})
"""The standard mixin's, where its source is not at hand."""


def uncleared(recogniser: Recogniser, function: Function, call: Call) -> bool:
    """Surely handed out with whatever was in it."""
    for keyword in call.at.keywords:
        if keyword.arg is None:
            return False
        if _says(keyword.arg):
            return isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    targets = recogniser.calls.targets(function, call.at)[0]
    if any(target in recogniser.wrappers for target in targets):
        return False  # a function that returns a lease may have filled it
    if not targets:
        return call.method not in CLEARED_BY_DEFAULT
    return all(_leaves_as_it_is(target) for target in targets)


def _says(name: str) -> bool:
    return any(name.strip("_").startswith(word) for word in SAYING)


def _leaves_as_it_is(function: Function) -> bool:
    node = function.node
    if isinstance(node, (ast.Module, ast.Lambda)):
        return False
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = list(zip(reversed(positional), reversed(args.defaults), strict=False))
    defaults += [(arg, value) for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value]
    for arg, value in defaults:
        if _says(arg.arg):
            return isinstance(value, ast.Constant) and value.value is False
    if any(_says(arg.arg) for arg in (*positional, *args.kwonlyargs)):
        return False
    names = {
        inner.func.attr if isinstance(inner.func, ast.Attribute) else getattr(inner.func, "id", "")
        for inner in walk(node)
        if isinstance(inner, ast.Call)
    }
    return not names & CLEARING
