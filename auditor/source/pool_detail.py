"""How a class goes about its pool: switch, threshold, what it builds, which methods set its state up."""

import ast
import re
from collections.abc import Iterator

from auditor.model import Span
from auditor.source.allocators import allocators
from auditor.source.entries import Built, ClassIndex, LargeAllocation, PoolDetail, Source
from auditor.source.fallbacks import fallbacks
from auditor.source.imports import dotted_text
from auditor.source.pool_use import LEASE, Function, pool_method

_POOLISH = re.compile(r"(?i)pool")
_THRESHOLD = re.compile(r"(?i)threshold|min_?(?:size|bytes|numel|elements|mb)")
_ATTACHING = re.compile(r"memory_pool")
_SUPER = "super()."


def pool_detail(
    node: ast.ClassDef,
    methods: dict[str, Function],
    source: Source,
    origins: dict[str, str],
    entry: ClassIndex,
) -> PoolDetail:
    init = methods.get("__init__")
    span, position = _switch(node, init, entry.switch, source)
    return PoolDetail(
        switch_span=span,
        switch_position=position,
        leases=any(
            LEASE.match(pool_method(each) or "") for each in ast.walk(node) if isinstance(each, ast.Call)
        ),
        has_threshold=any(_THRESHOLD.search(name) for name in _names(node)),
        built=tuple(_built(init, source, origins)) if init is not None else (),
        attaches=init is not None and _attaches(init),
        fallbacks=_fallbacks(methods, entry.allocations, source),
        sets=tuple(sorted(_sets(node, methods))),
        reads=tuple(sorted(_reads(methods))),
        calls=tuple((name, called) for name, method in methods.items() if (called := _own_calls(method))),
        init_span=source.span(init, None) if init is not None else None,
        allocators=tuple(allocators(methods, source)),
    )


def _switch(
    node: ast.ClassDef, init: Function | None, switch: str | None, source: Source
) -> tuple[Span | None, int | None]:
    """Where the switch is declared, and its place among the positional parameters."""
    if switch is None:
        return None, None
    if init is not None:
        positional = [each.arg for each in [*init.args.posonlyargs, *init.args.args]]
        every = [*init.args.posonlyargs, *init.args.args, *init.args.kwonlyargs]
        found = next(each for each in every if each.arg == switch)
        span = Span(
            source.path, found.lineno, found.col_offset + 1, found.lineno, found.col_offset + 1 + len(switch)
        )
        return span, positional.index(switch) - 1 if switch in positional else None
    fields = [
        each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    names = [each.target.id for each in fields if isinstance(each.target, ast.Name)]
    place = names.index(switch)
    return source.span(fields[place].target), place


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        match each:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                yield name


def _built(init: Function, source: Source, origins: dict[str, str]) -> Iterator[Built]:
    """Calls of what looks like a class, in `__init__`."""
    for node in ast.walk(init):
        if not isinstance(node, ast.Call) or (text := dotted_text(node.func)) is None:
            continue
        if not text.rpartition(".")[2].lstrip("_")[:1].isupper():
            continue
        head, dot, rest = text.partition(".")
        yield Built(
            name=origins.get(head, head) + dot + rest,
            span=source.span(node.func),
            positional=sum(not isinstance(each, ast.Starred) for each in node.args),
            keywords=tuple(each.arg for each in node.keywords if each.arg is not None),
            opaque=any(isinstance(each, ast.Starred) for each in node.args)
            or any(each.arg is None for each in node.keywords),
        )


def _attaches(init: Function) -> bool:
    """The children get their pool afterwards: `set_memory_pool(self)`, `child.enable_memory_pool = ...`."""
    for node in ast.walk(init):
        match node:
            case ast.Call(func=function) if _ATTACHING.search(
                (dotted_text(function) or "").rpartition(".")[2]
            ):
                if not _is_own(function):
                    return True
            case ast.Assign(targets=targets):
                if any(isinstance(each, ast.Attribute) and _ATTACHING.search(each.attr) and not _is_own(each)
                       for each in targets):  # fmt: skip
                    return True
    return False


def _is_own(node: ast.expr) -> bool:
    """`self.x`, and not `self.child.x`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _fallbacks(
    methods: dict[str, Function], allocations: tuple[LargeAllocation, ...], source: Source
) -> tuple[Span, ...]:
    wanted = {each.span for each in allocations if each.temporary}
    return tuple(sorted(fallbacks(methods, wanted, source))) if wanted else ()


def _sets(node: ast.ClassDef, methods: dict[str, Function]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        found |= {
            (each.id, "") for each in targets if isinstance(each, ast.Name) and _POOLISH.search(each.id)
        }
    for name, method in methods.items():
        if any((dotted_text(each) or "").endswith("property") for each in method.decorator_list):
            found.add((name, ""))
        found |= {(attribute, name) for attribute in _own_attributes(method, ast.Store)}
    return found


def _reads(methods: dict[str, Function]) -> set[tuple[str, str]]:
    return {
        (attribute, name)
        for name, method in methods.items()
        for attribute in _own_attributes(method, ast.Load)
    }


def _own_attributes(method: Function, use: type[ast.expr_context]) -> Iterator[str]:
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, use)
            and _is_own(node)
            and _POOLISH.search(node.attr)
        ):
            yield node.attr


def _own_calls(method: Function) -> tuple[str, ...]:
    """`m` of `self.m(...)`, `super().m` of `super().m(...)`, `Base.m` of `Base.m(self, ...)`."""
    found: set[str] = set()
    for node in ast.walk(method):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        match node.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                found.add(name)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                found.add(_SUPER + name)
            case _ if node.args and isinstance(node.args[0], ast.Name) and node.args[0].id == "self":
                found.add(dotted_text(node.func) or "")
    return tuple(sorted(found))
