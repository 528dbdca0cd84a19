"""Large tensors that a module allocates each time it runs: in forward, and in the methods forward calls on
self.
"""

import ast

from auditor.source.entries import LargeAllocation, Source
from auditor.source.large import verdict
from auditor.source.outline import ENTRY_POINTS, self_calls
from auditor.source.temporaries import Temporaries
from auditor.source.tensor_reader import TensorReader

Function = ast.FunctionDef | ast.AsyncFunctionDef

_MOST = 20  # a table row names one; more a class helps nobody and fills the cache


def large_allocations(
    path: list[Function], source: Source, origins: dict[str, str]
) -> tuple[LargeAllocation, ...]:
    """Every large allocation of the methods on the forward path, in the order of the source."""
    found: list[LargeAllocation] = []
    for method in path:
        reader = TensorReader(origins)
        reader.read(method)
        temporaries: Temporaries | None = None
        for made in reader.made:
            large = verdict(made, reader.sizes)
            if large is None:
                continue
            if made.is_factory and temporaries is None:
                temporaries = Temporaries(method)
            found.append(
                LargeAllocation(
                    operation=made.operation,
                    shape=large.shape,
                    bytes=large.bytes,
                    reason=large.reason,
                    span=source.span(made.node),
                    weight=large.weight,
                    temporary=made.is_factory and temporaries is not None and temporaries.holds(made.node),
                )
            )
    found.sort(key=lambda each: each.span)
    return tuple(found[:_MOST])


def forward_path(methods: dict[str, Function], source: Source) -> list[Function]:
    """The entry points a class has and what they reach through `self.method(...)`, each once, by line."""
    waiting = [methods[name] for name in ENTRY_POINTS if name in methods]
    reached: dict[str, Function] = {}
    while waiting:
        method = waiting.pop()
        if method.name in reached:
            continue
        reached[method.name] = method
        text = "\n".join(source.lines[method.lineno - 1 : method.end_lineno])
        waiting += [methods[name] for name in self_calls(text) if name in methods]
    return sorted(reached.values(), key=lambda each: each.lineno)
