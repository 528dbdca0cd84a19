"""One class statement to its index entry: bases, whether it is a module, and what its forward path
allocates.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from auditor.model import Span
from auditor.source.entries import ClassIndex, Source
from auditor.source.forward_path import forward_path, large_allocations
from auditor.source.imports import dotted_text
from auditor.source.nodes import HOLDERS, statements_in
from auditor.source.pool_detail import pool_detail
from auditor.source.pool_use import Function, may_mention_pool, may_use_pool, methods_of, pool_use

_MODULE = re.compile(r"^(?:torch\.)?nn\.(?:modules\.\w+\.)?[A-Z]\w*$")


@dataclass(frozen=True, slots=True)
class ClassReader:
    """`names_pool`: the file may use a pool, so all of its classes are read for that, local ones too."""

    source: Source
    origins: dict[str, str]
    names_pool: bool

    def classes(self) -> Iterator[ClassIndex]:
        """The classes of the file, nested ones too."""
        waiting: list[tuple[ast.AST, str]] = [(self.source.tree, "")]
        may_mention = self.names_pool and may_mention_pool(self.source.text)
        while waiting:
            parent, prefix = waiting.pop()
            for child in statements_in(parent):
                if isinstance(child, ast.ClassDef):
                    yield self._read(child, prefix, may_mention)
                    waiting.append((child, f"{prefix}{child.name}."))
                elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    if self.names_pool:
                        waiting.append((child, f"{prefix}{child.name}.<locals>."))
                elif type(child) in HOLDERS:
                    waiting.append((child, prefix))

    def _read(self, node: ast.ClassDef, prefix: str, may_mention: bool) -> ClassIndex:
        methods = methods_of(node)
        bases = tuple(
            _resolved(base, self.origins) for base in node.bases if not isinstance(base, ast.Starred)
        )
        path: list[Function] = []
        if _may_be_module(bases):
            path = forward_path(methods, self.source)
        entry = ClassIndex(
            name=node.name,
            qualname=f"{prefix}{node.name}",
            span=_header_span(node, self.source),
            bases=bases,
            is_module=any(_MODULE.match(base) for base in bases) or _has_module_forward(methods, bases),
            has_init="__init__" in methods,
            is_abstract=_is_abstract(methods, bases),
            allocations=large_allocations(path, self.source, self.origins),
        )
        if not self.names_pool:
            return entry
        may_use = may_use_pool(self.source.text_of(node))
        entry = replace(entry, **pool_use(node, methods, self.origins, may_mention, may_use))
        if not (entry.mentions_pool or entry.defines_pool or entry.switch):
            return entry
        return replace(entry, detail=pool_detail(node, methods, self.source, self.origins, entry))


def _resolved(base: ast.expr, origins: dict[str, str]) -> str:
    if isinstance(base, ast.Subscript):  # Generic[T] and friends
        base = base.value
    text = dotted_text(base)
    if text is None:
        return ast.unparse(base)
    head, dot, rest = text.partition(".")
    return origins.get(head, head) + dot + rest


def _has_module_forward(methods: dict[str, Function], bases: tuple[str, ...]) -> bool:
    """A `forward(self, ...)` under a base that another file defines; `autograd.Function` is no module."""
    forward = methods.get("forward")
    if forward is None or not _may_be_module(bases):
        return False
    first = next(iter([*forward.args.posonlyargs, *forward.args.args]), None)
    return first is not None and first.arg == "self"


def _may_be_module(bases: tuple[str, ...]) -> bool:
    """Other files decide what a base is; a class without any, and a function of autograd, is no module."""
    return bool(bases) and not any(base.endswith("Function") for base in bases)


def _is_abstract(methods: dict[str, Function], bases: tuple[str, ...]) -> bool:
    if any(base.endswith(("Protocol", "abc.ABC")) or base == "ABC" for base in bases):
        return True
    return any(
        (dotted_text(decorator) or "").endswith("abstractmethod")
        for method in methods.values()
        for decorator in method.decorator_list
    )


def _header_span(node: ast.ClassDef, source: Source) -> Span:
    """`class Name`, without bases and body: what an editor should underline."""
    whole = source.span(node)
    row = source.lines[node.lineno - 1]
    at = row.find(node.name, whole.column + len("class"))
    end = at + len(node.name) + 1 if at >= 0 else len(row) + 1
    return Span(source.path, whole.line, whole.column, whole.line, end)
