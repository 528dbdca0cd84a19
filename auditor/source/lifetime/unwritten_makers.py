"""Calls besides `empty` that make memory which nobody wrote: tensors by their size, and ufuncs with holes."""

import ast

from auditor.source.lifetime.code import Code, last_name
from auditor.source.nodes import every_node

MADE_BY_SIZE = (
    "Tensor",
    "FloatTensor",
    "DoubleTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "ByteTensor",
)
WITH_HOLES = ("divide", "true_divide", "floor_divide", "log", "log2", "log10", "sqrt", "power", "reciprocal")
"""Functions of numpy that are given `where=` so that some elements are not computed."""

CHOOSING = frozenset({"where", "select", "choose", "putmask", "copyto", "place", "compress", "nan_to_num"})


def is_sized(call: ast.Call) -> bool:
    """`torch.FloatTensor(1)` has one element of whatever was there; `torch.FloatTensor(values)` is a copy."""
    sizes = [
        arg for arg in call.args if isinstance(arg, ast.Constant) and type(arg.value) is int and arg.value > 0
    ]
    return len(sizes) == len(call.args) > 0 and not call.keywords


def leaves_holes(call: ast.Call) -> bool:
    """`np.divide(a, b, where=b != 0)` without `out`: what is left out is never written."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "where" not in given or "out" in given or None in given or isinstance(given["where"], ast.Constant):
        return False
    return len(call.args) <= (
        1 if last_name(call.func) in ("log", "log2", "log10", "sqrt", "reciprocal") else 2
    )


def is_chosen_from(code: Code, statement: ast.AST, name: str) -> bool:
    """Whether the function picks elements of it, or overwrites some: the computed ones, or the others."""
    function = code.function_of(statement)
    for node in every_node(function) if function is not None else ():
        if not isinstance(node, ast.Name) or node.id != name:
            continue
        parent = code.parents[node]
        if isinstance(parent, ast.Subscript) and parent.value is node:
            return True
        if isinstance(parent, ast.Call) and last_name(parent.func) in CHOOSING:
            return True
    masked = (
        [n for n in every_node(function) if isinstance(n, ast.keyword) and n.arg == "where"]
        if function
        else []
    )
    return len(masked) > 1  # what was computed is reduced with the same mask
