"""Caches of tensors with an entry for every shape (PA508)."""

import ast
import re
from collections.abc import Iterator

from auditor.source.lifetime.code import (
    Code,
    Function,
    assigned,
    calls_in,
    last_name,
    names_in,
    place,
    short,
    text_of,
    within,
)
from auditor.source.lifetime.module_caches import is_cache
from auditor.source.lifetime.sighting import Kind, Sighting

IN_TABLE, BY_DECORATOR = "in a table", "by decorator"

# Parameters that change with the data. Widths, heads, blocks (`hidden_size`, `window`, `D`) are the model's.
_SIZE = re.compile(
    r"^(?:n|h|w|t|l|hw|height|width|lengths?|resolution|total|bs|bsz|B|seqlens?|cu_seqlens|seq_?len\w*|num_tokens"
    r"|batch_?size|\w+_len|\w+_length|\w+_lengths|(?:\w+_)?[TNL](?:_\w+)?)$"
)
_ONE_ROW = frozenset(("arange", "linspace", "tensor", "as_tensor", "zeros", "ones", "full", "empty"))
_FACTORY = frozenset(
    (
        "arange", "zeros", "ones", "full", "empty", "linspace", "cat", "stack", "tril", "triu",
        "meshgrid", "tensor", "outer", "einsum", "zeros_like", "ones_like", "full_like", "empty_like",
        "randn", "rand", "eye", "cos", "sin", "as_tensor",
    )
)  # fmt: skip
_EVICTS = frozenset(("pop", "popitem", "clear", "popleft"))


def shapes_cached(code: Code) -> Iterator[Sighting]:
    for node in code.of(ast.Assign):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=table, slice=key)], value=value):
                function = code.function_of(node) if "cache" in last_name(table).lower() else None
                if (
                    function is None
                    or not _is_of_shape(function, key)
                    or not _is_tensor(function, value, node)
                ):
                    continue
                if _is_unbounded(code, function, table) and not _is_limited(code, node, key):
                    yield code.sighting(Kind.SHAPES_CACHED, node, short(key), short(table), IN_TABLE)
    for function in code.functions:
        for decorator in function.decorator_list:
            if _is_endless(decorator) and is_cache(code, decorator):
                yield from _cached_function(code, function, decorator)


def _cached_function(code: Code, function: Function, decorator: ast.expr) -> Iterator[Sighting]:
    """`@cache` on a function from sizes to a tensor."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    sizes = [each.arg for each in arguments if _SIZE.match(each.arg)]
    returned = [
        node.value for node in within(function) if isinstance(node, ast.Return) and node.value is not None
    ]
    if sizes and any(_is_tensor(function, value, value) for value in returned):
        yield code.sighting(Kind.SHAPES_CACHED, decorator, ", ".join(sizes), function.name, BY_DECORATOR)


def _is_limited(code: Code, node: ast.AST, key: ast.expr) -> bool:
    """`if n <= LIMIT:` around the store."""
    for parent in code.above(node):
        if isinstance(parent, Function):
            return False
        if isinstance(parent, ast.If):
            for test in ast.walk(parent.test):
                if isinstance(test, ast.Compare) and isinstance(
                    test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE
                ):
                    return True
    return False


def _is_endless(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call):
        return last_name(decorator) == "cache"
    given = [*decorator.args[:1], *(k.value for k in decorator.keywords if k.arg == "maxsize")]
    return any(isinstance(value, ast.Constant) and value.value is None for value in given)


def _is_unbounded(code: Code, function: Function, table: ast.expr) -> bool:
    """A dict on self or of the module that is filled and never emptied."""
    text = text_of(table)
    if not text.startswith("self.") and (assigned([function], text) or "." in text):
        return False
    owner = code.class_of(function) if text.startswith("self.") else None
    scope: ast.AST = owner or code.source.tree
    made = False
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(
            _names(target, text) for target in _targets(node)
        ):
            if not _is_dict(node.value) or _inside_call(code, node):
                return False
            made = True
        elif _empties(node, text):
            return False
    return made


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _names(target: ast.expr, text: str) -> bool:
    return not isinstance(target, ast.Subscript) and text_of(target) == text


def _is_dict(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.Call) and last_name(value.func) in ("dict", "OrderedDict", "defaultdict")


def _inside_call(code: Code, node: ast.AST) -> bool:
    """Whether the table is made anew by something else than the constructor or the module."""
    function = code.function_of(node)
    return function is not None and function.name not in ("__init__", "__post_init__", "_init_cache")


def _empties(node: ast.AST, text: str) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=kept, attr=name)) if name in _EVICTS:
            return text_of(kept) == text
        case ast.Call(func=ast.Name(id="len"), args=[kept]):
            return text_of(kept) == text
        case ast.Delete(targets=targets):
            return any(isinstance(each, ast.Subscript) and text_of(each.value) == text for each in targets)
    return False


def _is_of_shape(function: Function, key: ast.expr, depth: int = 2) -> bool:
    """Whether a key is made of sizes of the data: `x.shape[1]`, `len(x)`, a parameter called `seq_len`."""
    for node in ast.walk(key):
        match node:
            case ast.Subscript(value=ast.Attribute(attr="shape"), slice=index):
                if text_of(index) != "-1":  # the last one is the model's width
                    return True
            case ast.Call(func=ast.Attribute(attr="size"), args=[index]):
                if text_of(index) != "-1":
                    return True
            case ast.Call(func=ast.Attribute(attr="size"), args=[]) if node is key:  # `b, n, d = x.size()`
                return True
            case ast.Attribute(attr="shape") if node is key:
                return True
            case ast.Call(func=ast.Name(id="len")):
                return True
            case ast.Name(id=name):
                bound = assigned([function], name)
                values = [each.value for each in bound if isinstance(each, ast.Assign)]
                if depth and any(_is_of_shape(function, value, depth - 1) for value in values):
                    return True
                if not bound and _SIZE.match(name) and name in {each.arg for each in function.args.args}:
                    return True
    return False


def _is_tensor(function: Function, value: ast.expr, at: ast.AST) -> bool:
    """Whether torch made the value, here or where its name was bound, and it is more than one row."""
    if isinstance(value, ast.Name):
        before = [
            n for n in assigned([function], value.id) if place(n) < place(at) and isinstance(n, ast.Assign)
        ]
        return any(
            _is_tensor(function, n.value, n)
            for n in before
            if isinstance(n, ast.Assign) and value.id not in names_in(n.value)
        )
    if isinstance(value, ast.Tuple):
        return any(_is_tensor(function, part, at) for part in value.elts)
    made = [
        call
        for call in calls_in(value)
        if text_of(call.func).startswith("torch.") and last_name(call.func) in _FACTORY
    ]
    if any(
        isinstance(each, ast.Name) and _is_tensor(function, each, at)
        for call in made
        for each in _operands(call)
    ):
        return True
    return any(not _is_one_row(call) for call in made) or (bool(made) and _spreads(value))


def _operands(call: ast.Call) -> list[ast.expr]:
    return [
        part
        for each in call.args
        for part in (each.elts if isinstance(each, ast.List | ast.Tuple) else [each])
    ]


def _is_one_row(call: ast.Call) -> bool:
    """`torch.arange(n)`, `torch.zeros(n)`, `torch.full((n,), x)`: some kilobytes."""
    name = last_name(call.func)
    if name not in _ONE_ROW:
        return False
    if name in ("arange", "linspace", "tensor", "as_tensor"):
        return True
    shape = call.args[0] if call.args else None
    if isinstance(shape, ast.Tuple | ast.List):
        return len(shape.elts) < 2
    return name == "full" or len(call.args) < 2


def _spreads(value: ast.expr) -> bool:
    """`row[:, None] * column`"""
    return any(isinstance(node, ast.Constant) and node.value is None for node in ast.walk(value)) or any(
        last_name(call.func) in ("outer", "repeat", "expand", "unsqueeze", "repeat_interleave")
        for call in calls_in(value)
    )
