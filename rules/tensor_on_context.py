"""PA506 tensor-on-context: an autograd function sets a tensor on ctx instead of saving it.

What: in `forward` of a `torch.autograd.Function`, an output, an intermediate result or an input that has
a gradient is assigned to an attribute of ctx, and backward does not delete it.

Why: `save_for_backward` is emptied when backward has run, knows outputs without holding them in a circle,
notices in-place changes, and goes through saved-tensor hooks (offloading, checkpointing). An attribute
does none of it: an output set on ctx is a reference cycle (output, its node, ctx, output) that waits for
the garbage collector; anything else stays until the whole graph dies.

In production: memory rises in steps and falls when the collector happens to run; with outputs that no
loss uses it only rises. Offloading of activations saves less than it should.

Not reported: numbers, shapes, groups, callables; weights and biases, which live with their module anyway;
attributes that backward deletes or sets to None; functions without a backward of their own.

Example:
    def forward(ctx, x):
        y = x.exp()
        ctx.y = y

Fix: `ctx.save_for_backward(y)`, and `(y,) = ctx.saved_tensors` in backward. Intermediates may be saved
too.

Evidence: https://github.com/pytorch/pytorch/issues/25340, https://github.com/pytorch/pytorch/issues/5569,
https://github.com/asappresearch/sru/pull/171, https://github.com/pytorch/pytorch/pull/153005
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA506", name="tensor-on-context", severity=Severity.WARNING)

BAD = """\
import torch


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.y = y
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.y
"""

GOOD = """\
import torch


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y
"""

_UNTIL = {
    "output": "it is an output, so the two hold each other until the garbage collector runs",
    "intermediate": "it stays until the whole graph dies, not until backward has used it",
    "input": "it stays until the whole graph dies, and in-place changes of it go unnoticed",
}


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.TENSOR_ON_CONTEXT):
        yield META.finding(each.span, each.symbol, _message(each))


def _message(each: Sighting) -> str:
    return f"`{each.where}` holds the tensor `{each.what}` past save_for_backward: {_UNTIL[each.how]}"
