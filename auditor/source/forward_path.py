"""Large tensors that a module allocates each time it runs: in forward, and in the methods forward calls on
self.
"""

import ast
import re

from auditor.source.entries import LargeAllocation, Source
from auditor.source.large import verdict
from auditor.source.temporaries import Temporaries
from auditor.source.tensor_reader import TensorReader

Function = ast.FunctionDef | ast.AsyncFunctionDef

_MOST = 20  # a table row names one; more a class helps nobody and fills the cache
_ENTRY_POINTS = ("forward", "__call__")
_SELF_CALL = re.compile(
    r"self(?<!\wself)\.(\w+)\("
)  # starts with a literal: searched three times as fast as \b


def _called(*names: str) -> re.Pattern[str]:
    """Finds a call of what ends so in a text that is read from its end, where the bracket comes first: for
    many names at once that costs half of what looking for each does."""
    return re.compile(rf"\((?:{'|'.join(name[::-1] for name in names)})")


# A method without any of these, or `@`, allocates nothing that could be called large.
_FACTORY = _called(
    "zeros", "ones", "empty", "full", "rand", "randn", "randint", "eye", "s_like", "empty_like",
    "full_like", "rand_like", "randn_like", "matmul", "bmm", "einsum",
)  # fmt: skip
# These are large only where a shape is known, and a shape is known only where the method writes one down.
_GROWS = _called(
    "tril", "triu", "one_hot", "arange", "cat", "concat", "stack", "repeat", "gather", "softmax",
    "clone", "contiguous", "pad",
)  # fmt: skip
_SHAPED = (".shape", ".size(", "view(", "reshape(", "arange(")


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
    """The methods that may allocate among the entry points a class has and what they reach through
    `self.method(...)`, each once, by line.
    """
    waiting = [name for name in _ENTRY_POINTS if name in methods]
    texts: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name] = text = _text(methods[name], source)
            waiting += [called for called in _SELF_CALL.findall(text) if called in methods]
    found = [methods[name] for name, text in texts.items() if _may_allocate(text)]
    return sorted(found, key=lambda each: each.lineno)


def _text(method: Function, source: Source) -> str:
    return "\n".join(source.lines[method.lineno - 1 : method.end_lineno])


def _may_allocate(text: str) -> bool:
    backwards = text[::-1]
    if " @ " in text or _FACTORY.search(backwards):
        return True
    return any(map(text.__contains__, _SHAPED)) and _GROWS.search(backwards) is not None
