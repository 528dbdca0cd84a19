"""Tensors that an autograd function sets on its context by hand (PA506)."""

import ast
import re
from collections.abc import Iterator

from auditor.source.lifetime.code import (
    Code,
    Function,
    assigned,
    last_name,
    place,
    text_of,
    within,
)
from auditor.source.lifetime.sighting import Kind, Sighting

_MAKES = frozenset(
    (
        "clone", "exp", "log", "sigmoid", "tanh", "relu", "softmax", "matmul", "mm", "bmm", "add", "mul",
        "sum", "mean", "cat", "stack", "zeros_like", "ones_like", "empty_like", "full_like", "zeros",
        "ones", "empty", "full", "einsum", "where", "sqrt", "rsqrt", "pow", "cumsum", "norm", "linear",
        "contiguous", "new_empty", "new_zeros", "sort", "argsort", "topk", "gather", "index_select",
    )
)  # fmt: skip
_PARAMETER = re.compile(r"weight|bias", re.I)  # lives as long as its module, wherever it is saved
OUTPUT, INPUT, INTERMEDIATE = "output", "input", "intermediate"


def tensors_on_context(code: Code) -> Iterator[Sighting]:
    for owner in code.classes:
        if not any(_is_function(code, base) for base in owner.bases):
            continue
        methods = {node.name: node for node in owner.body if isinstance(node, Function)}
        forward = methods.get("forward")
        if forward is None or len(forward.args.args) < 2 or "backward" not in methods:
            continue
        freed = _freed_by_hand(methods["backward"])
        yield from _in_forward(code, forward, methods["backward"], freed)


def _is_function(code: Code, base: ast.expr) -> bool:
    text = text_of(base)
    head, _, rest = text.partition(".")
    full = code.origins.get(head, head) + (f".{rest}" if rest else "")
    return full in (
        "torch.autograd.Function",
        "torch.autograd.function.Function",
        "autograd.Function",
        "torch.autograd.function.InplaceFunction",
    )


def _freed_by_hand(backward: Function) -> set[str]:
    """The attributes that backward deletes or sets to None."""
    context = backward.args.args[0].arg if backward.args.args else "ctx"
    return {
        node.attr
        for node in ast.walk(backward)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and text_of(node.value) == context
    }


def _in_forward(code: Code, forward: Function, backward: Function, freed: set[str]) -> Iterator[Sighting]:
    context = forward.args.args[0].arg
    inputs = {each.arg for each in forward.args.args[1:]}
    outputs = {
        name
        for node in within(forward)
        if isinstance(node, ast.Return) and node.value
        for name in _returned(node.value)
    }
    for node in within(forward):
        if not isinstance(node, ast.Assign):
            continue
        for target, value in _pairs(node):
            if (
                not (isinstance(target, ast.Attribute) and text_of(target.value) == context)
                or target.attr in freed
            ):
                continue
            if not isinstance(value, ast.Name) or target.attr in ("needs_input_grad", "saved_tensors"):
                continue
            how = OUTPUT if value.id in outputs else INPUT if value.id in inputs else INTERMEDIATE
            if _is_tensor(forward, backward, context, target.attr, value, how):
                yield code.sighting(Kind.TENSOR_ON_CONTEXT, node, value.id, f"{context}.{target.attr}", how)
                break


def _returned(value: ast.expr) -> set[str]:
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """`a, b = x, y` as two assignments."""
    found = []
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            found += list(zip(target.elts, node.value.elts, strict=False))
        else:
            found.append((target, node.value))
    return found


def _is_tensor(
    forward: Function, backward: Function, context: str, attribute: str, value: ast.Name, how: str
) -> bool:
    """Evidence that the name is a tensor: made by torch, annotated, or given a gradient on the way back."""
    annotation = next((a.annotation for a in forward.args.args if a.arg == value.id and a.annotation), None)
    if annotation is not None and not _is_tensor_type(ast.unparse(annotation)):
        return False
    before = [
        n for n in assigned([forward], value.id) if isinstance(n, ast.Assign) and place(n) < place(value)
    ]
    if before:
        return _makes_tensor(before[-1].value)
    names = [each.arg for each in forward.args.args[1:]]
    if value.id not in names or forward.args.vararg or _PARAMETER.search(value.id):
        return False
    return _has_gradient(backward, names.index(value.id), len(names))


def _is_tensor_type(annotation: str) -> bool:
    """`torch.Tensor`, optional or not; what may be a number as well is mostly kept where it is one."""
    text = annotation.strip("'\"").removeprefix("typing.").removeprefix("Optional[").removesuffix("]")
    return all(part.strip() in ("Tensor", "torch.Tensor", "None") for part in text.split("|"))


def _makes_tensor(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return _makes_tensor(value.left) or _makes_tensor(value.right)
    if not isinstance(value, ast.Call):
        return False
    name = last_name(value.func)
    if name in ("shape", "size", "tolist", "item"):
        return False
    return name in _MAKES and (isinstance(value.func, ast.Attribute))


def _has_gradient(backward: Function, position: int, count: int) -> bool:
    """Whether backward returns something for the input at this position: only tensors have gradients."""
    for node in within(backward):
        if isinstance(node, ast.Return) and node.value is not None:
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            each_has_one = len(parts) == count and not any(isinstance(each, ast.Starred) for each in parts)
            if each_has_one and isinstance(parts[position], ast.Name | ast.BinOp | ast.Call):
                return True
    return False
