"""What a class does with a memory pool, judged by names; the flow analysis corrects it where it decided."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from auditor.source.imports import dotted_text
from auditor.source.nodes import every_node

ACQUIRE = re.compile(
    r"^_?(?:allocate|acquire|alloc|lease|borrow|checkout|rent)(?:_\w+)?$|^_?get_(?:tensor|buffer)s?$"
)
RELEASE = re.compile(
    r"^_?(?:deallocate|dealloc|release|free|give_back|return|put_back|recycle)(?:_\w+)?$|^_?put_(?:tensor|buffer)s?$"
)
LEASE = re.compile(r"^_?lease(?:_\w+)?$")
_CLEANUP = re.compile(
    r"^(?:_?cleanup\w*|_?clear\w*|close|shutdown|teardown|release\w*|__exit__|__aexit__|__del__)$"
)
_MIXIN_CALLS = frozenset({"_allocate_tensor", "_deallocate_tensor", "_lease_tensor"})
_POOL = re.compile(r"(?i)pool|arena|workspace")
_ANY_POOL = ("pool", "arena", "workspace", *sorted(_MIXIN_CALLS))
_MEMORY_POOL = re.compile(r"memory_pool|MemoryPool")
_SIZE = re.compile(r"shape|size|numel|nbytes")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def methods_of(node: ast.ClassDef) -> dict[str, Function]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def may_mention_pool(text: str) -> bool:
    """Whether a name of this text may speak of a memory pool; Python reads letters of other alphabets as
    plain ones."""
    return not text.isascii() or _MEMORY_POOL.search(text) is not None


def may_use_pool(text: str) -> bool:
    """Whether a class of this text may ask any pool for something, or speak of one."""
    return not text.isascii() or any(map(text.lower().__contains__, _ANY_POOL))


def pool_use(
    node: ast.ClassDef, methods: dict[str, Function], origins: dict[str, str],
    may_mention: bool = True, may_use: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The fields of `ClassIndex` that speak of pools; `may_mention` is what `may_mention_pool` says of its
    file, and `may_use` what `may_use_pool` says of its own text: what is no to that says nothing of pools."""
    defines = _defines_pool(methods)
    nodes = list(every_node(node)) if may_use else []
    calls = [] if defines else [call for call in nodes if isinstance(call, ast.Call)]
    names = [name for call in calls if (name := pool_method(call))]
    leases = any(LEASE.match(name) for name in names)
    switch, default = _switch(node, methods)
    return {
        "has_init": "__init__" in methods or switch is not None,
        "switch": switch,
        "switch_default": default,
        "acquires": leases or any(ACQUIRE.match(name) for name in names),
        "releases": leases or any(RELEASE.match(name) for name in names),
        "cleans_up": may_use and _cleans_up(methods),
        "mentions_pool": bool(names) or (may_mention and any(_mentions(each) for each in nodes)),
        "defines_pool": defines,
        "serves_tensors": defines and any(_serves_tensors(name, each) for name, each in methods.items()),
        "keeps_leases": _keeps_leases(nodes),
        "passes_switch": any(_passes_switch(call) for call in calls),
        "builds": tuple(sorted(_builds(methods, origins))),
    }


def pool_method(call: ast.Call) -> str | None:
    """The method a pool is asked for: `self._allocate_tensor`, `pool.allocate`, `self.memory_pool.free`."""
    if not isinstance(call.func, ast.Attribute):
        return None
    name = call.func.attr
    if not (ACQUIRE.match(name) or RELEASE.match(name)):
        return None
    receiver = ast.unparse(call.func.value)
    return name if name in _MIXIN_CALLS or _POOL.search(receiver) or _POOL.search(name) else None


def _defines_pool(methods: dict[str, Function]) -> bool:
    """Both halves of a pair as methods, the first taking a shape or size: a pool itself."""
    takes = any(ACQUIRE.match(name) and _takes_size(method) for name, method in methods.items())
    return takes and any(RELEASE.match(name) for name in methods)


def _serves_tensors(name: str, method: Function) -> bool:
    """`allocate(shape, dtype, device)`; a pool of blocks or bytes takes a count."""
    names = {each.arg for each in [*method.args.args, *method.args.kwonlyargs]}
    asks = any("shape" in each for each in names) or bool(
        names & {"dtype", "device"} and names & {"size", "sizes"}
    )
    return bool(ACQUIRE.match(name)) and asks


def _takes_size(method: Function) -> bool:
    return any(_SIZE.search(each.arg) for each in [*method.args.args, *method.args.kwonlyargs])


def _switch(node: ast.ClassDef, methods: dict[str, Function]) -> tuple[str | None, bool | None]:
    """The boolean `__init__` parameter whose name contains memory_pool, a dataclass's field included."""
    for name, annotation, default in init_parameters(node, methods):
        if "memory_pool" not in name:
            continue
        value = default.value if isinstance(default, ast.Constant) else None
        if isinstance(value, bool):
            return name, value
        if annotation is not None and ast.unparse(annotation).startswith(("bool", "Optional[bool", "'bool")):
            return name, None
        if default is None and annotation is None and re.match(r"(?:enable|use|with|disable)_", name):
            return name, None
    return None, None


def init_parameters(
    node: ast.ClassDef, methods: dict[str, Function]
) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    init = methods.get("__init__")
    if init is not None:
        yield from parameters(init)
    elif any((dotted_text(_callee(each)) or "").endswith("dataclass") for each in node.decorator_list):
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                yield each.target.id, each.annotation, each.value


def _callee(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def parameters(function: Function) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    for each, default in zip(positional, [*padding, *arguments.defaults], strict=True):
        yield each.arg, each.annotation, default
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield each.arg, each.annotation, default


def _cleans_up(methods: dict[str, Function]) -> bool:
    return any(
        _CLEANUP.match(name) and any(_mentions(each) or _gives_back(each) for each in every_node(method))
        for name, method in methods.items()
    )


def _gives_back(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(RELEASE.match(pool_method(node) or ""))


def _mentions(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return bool(_MEMORY_POOL.search(name))
        case ast.FunctionDef(name=name):
            return bool(_MEMORY_POOL.search(name))
    return False


def _keeps_leases(nodes: list[ast.AST]) -> bool:
    """`self.x = pool.allocate(...)`, or a pool of its own: something is left when a method returns."""
    for each in nodes:
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
            to_self = any((dotted_text(target) or "").startswith("self.") for target in each.targets)
            if to_self and (ACQUIRE.match(pool_method(each.value) or "") or _makes_pool(each.value)):
                return True
    return False


def _makes_pool(call: ast.Call) -> bool:
    return (dotted_text(call.func) or "").rpartition(".")[2].endswith("Pool")


def _passes_switch(call: ast.Call) -> bool:
    """`Layer(enable_memory_pool=...)`, or `Layer(config, enable_memory_pool)`."""
    if any(keyword.arg is not None and "memory_pool" in keyword.arg for keyword in call.keywords):
        return True
    name = (dotted_text(call.func) or "").rpartition(".")[2].lstrip("_")
    return name[:1].isupper() and any("memory_pool" in (dotted_text(each) or "") for each in call.args)


def _builds(methods: dict[str, Function], origins: dict[str, str]) -> Iterator[str]:
    init = methods.get("__init__")
    for node in every_node(init) if init is not None else ():
        if isinstance(node, ast.Call) and (text := dotted_text(node.func)):
            head, dot, rest = text.partition(".")
            if text.rpartition(".")[2][:1].isupper():
                yield origins.get(head, head) + dot + rest
