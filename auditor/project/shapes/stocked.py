"""Stores that a class stocks with memory before anybody asks for any: who takes a buffer has it on loan."""

import ast
from collections.abc import Iterator, Sequence

from auditor.project.code.bindings import given_to, given_to_field
from auditor.project.code.modules import last_part
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.own_helpers import Works, all_put
from auditor.source.nodes import walk

MAKERS = frozenset({"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "bytearray", "SharedMemory",
                    "mmap", "pin_memory"})  # fmt: skip
"""Functions of torch, numpy and the standard library that make memory."""


def stocked_with_memory(begun: Sequence[FieldWork], works: Works, name: str) -> bool:
    """`for size in sizes: self.give(Segment(torch.empty(size)))`, `self.rest = [torch.empty(n) for n in ns]`;
    a work queue may be full at first, but of no memory."""
    return any(_stocks(work, works, name) for work in begun)


def _stocks(work: FieldWork, works: Works, name: str) -> bool:
    loops = [node for node in work.method.statements if isinstance(node, ast.For | ast.While)]
    by_loop = any(
        put.field == name and any(_makes_memory(value) for value in _values(work, put.value))
        for put, at in all_put(work, works)
        if any(each is at for loop in loops for each in walk(loop))
    )
    return by_loop or any(
        isinstance(each, ast.ListComp | ast.GeneratorExp) and _makes_memory(each.elt)
        for value in given_to_field(work.method, name)
        for each in walk(value)
    )


def _values(work: FieldWork, value: ast.expr) -> Iterator[ast.expr]:
    yield value
    if isinstance(value, ast.Name):
        yield from given_to(work.method, value.id)


def _makes_memory(value: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) and last_part(node.func) in MAKERS for node in walk(value))
