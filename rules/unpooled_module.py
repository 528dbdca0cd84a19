"""PA302 unpooled-module: a module allocates large tensors on its forward path, beside a pool it does not use.

What: the project has a tensor pool, and this `nn.Module` makes a large temporary on its forward path (in
`forward`, or in a method that `forward` calls on self) with plain torch. Large means quadratic in a
length of the input, three or more sizes of the input multiplied, or 16 MiB by constants alone; the
message gives the shape and its bytes by symbol.

Why: every call pays for fresh memory (page faults on CPU, fragmentation of the caching allocator on
CUDA), and the peak is the sum of all modules' temporaries where a shared pool would make it the largest.
A project pays for its pool with complexity; a module that goes around it keeps the cost and loses the
gain.

Not reported: tensors that leave the module or that autograd keeps (they are no temporaries, so no pool
may have them back), views, projects without a tensor pool, classes that inherit their pool use or leave
it to a child that pools, abstract classes, tests.

Example:
    class Attention(nn.Module):              # the project's other modules take their scores from a pool
        def forward(self, q, k, v):
            b, n, h, d = q.shape
            scores = torch.empty(b, h, n, n)
            torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1), out=scores)

Fix: `poolaudit adopt` gives the class the mixin and takes the temporary from the pool.
"""

from collections.abc import Iterator

from auditor.facts import ClassIndex, Facts
from auditor.model import Finding, Severity, Step
from auditor.rule import Meta

META = Meta(code="PA302", name="unpooled-module", severity=Severity.WARNING)

_POOLED = """\
import torch
from torch import nn


class Pooled(nn.Module):
    def __init__(self, enable_memory_pool: bool = False):
        super().__init__()
        self.pool = TensorPool() if enable_memory_pool else None

"""

BAD = (
    _POOLED
    + """\

class Attention(nn.Module):
    def forward(self, q, k, v, out):
        b, n, h, d = q.shape
        scores = torch.empty(b, h, n, n)
        torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1), out=scores)
        torch.matmul(scores.softmax_(-1), v.transpose(1, 2), out=out)
        return out
"""
)

GOOD = (
    _POOLED
    + """\

class Attention(Pooled):
    def forward(self, q, k, v, out):
        b, n, h, d = q.shape
        with self._lease_tensor((b, h, n, n), q.dtype, q.device) as scores:
            torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1), out=scores)
            torch.matmul(scores.softmax_(-1), v.transpose(1, 2), out=out)
        return out
"""
)


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.modules_without_pool:
        yield META.finding(each.span, each.qualname, _message(each), trace=_trace(each))


def _message(entry: ClassIndex) -> str:
    first, *others = [each for each in entry.allocations if each.temporary]
    more = f" and {len(others)} more like it" if others else ""
    return (
        f"`{entry.name}` allocates {first.operation}({first.shape}), {first.bytes} bytes, "
        f"on every forward{more}, and does not use the project's pool: {first.reason}"
    )


def _trace(entry: ClassIndex) -> tuple[Step, ...]:
    return tuple(
        Step(
            each.span.path,
            each.span.line,
            each.span.column,
            f"{each.operation}: {each.bytes} bytes, {each.reason}",
        )
        for each in entry.allocations
        if each.temporary
    )
