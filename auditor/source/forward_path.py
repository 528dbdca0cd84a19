"""Large tensors that a module allocates each time it runs: in forward, and in the methods forward calls on self."""

import ast

from auditor.source.entries import LargeAllocation, Source
from auditor.source.large import verdict
from auditor.source.outline import ENTRY_POINTS
from auditor.source.temporaries import Temporaries
from auditor.source.tensor_reader import TensorReader

Function = ast.FunctionDef | ast.AsyncFunctionDef

_MOST = 20  # a table row names one; more a class helps nobody and fills the cache


def large_allocations(
    methods: dict[str, Function], source: Source, origins: dict[str, str]
) -> tuple[LargeAllocation, ...]:
    """Every large allocation on the forward path, in the order of the source."""
    found: list[LargeAllocation] = []
    for method in forward_path(methods):
        reader = TensorReader(origins)
        reader.read(method)
        temporaries: Temporaries | None = None
        for made in reader.made:
            large = verdict(made, reader.sizes)
            if large is None:
                continue
            temporaries = temporaries or Temporaries(method)
            found.append(
                LargeAllocation(
                    operation=made.operation,
                    shape=large.shape,
                    bytes=large.bytes,
                    reason=large.reason,
                    span=source.span(made.node),
                    weight=large.weight,
                    temporary=made.is_factory and temporaries.holds(made.node),
                )
            )
    found.sort(key=lambda each: each.span)
    return tuple(found[:_MOST])


def forward_path(methods: dict[str, Function]) -> list[Function]:
    """The entry points a class has and what they reach through `self.method(...)`, each once, by line."""
    waiting = [methods[name] for name in ENTRY_POINTS if name in methods]
    reached: dict[str, Function] = {}
    while waiting:
        method = waiting.pop()
        if method.name in reached:
            continue
        reached[method.name] = method
        waiting += [methods[name] for name in _self_calls(method) if name in methods]
    return sorted(reached.values(), key=lambda each: each.lineno)


def _self_calls(method: Function) -> list[str]:
    return [
        node.func.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    ]
