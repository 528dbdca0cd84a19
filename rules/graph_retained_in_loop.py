"""PA507 graph-retained-in-loop: backward keeps the graph on every turn, and nothing uses or breaks it.

What: `backward(create_graph=True)` in a loop in which nobody takes the gradients away; or
`backward(retain_graph=True)` as the only backward pass of a turn, over a graph that the turn itself
built.

Why: with `create_graph=True` each parameter's `.grad` has a graph that leads back to the parameter: a
cycle that Python's collector cannot see, so that nothing of it is ever freed, and accumulating into
`.grad` chains the turns. With `retain_graph=True` everything that the turn saved stays until its loss is
bound anew: the peak is two turns instead of one, and the error that it hides (a state carried along,
PA502) becomes a leak.

In production: with create_graph memory rises by a graph on every step; with retain_graph the peak is up
to two graphs, and the batch has to be smaller for it.

Not reported: `autograd.grad`, which has no cycle; loops that call `zero_grad()` or set `.grad = None`;
several backward passes in a turn; graphs from outside of the loop (rows of a Jacobian, shared features).

Example:
    for x, y in loader:
        criterion(model(x), y).backward(retain_graph=True)
        optimizer.step()

Fix: leave retain_graph out (if that raises, detach what the turn got from the one before); take
second-order gradients by `torch.autograd.grad(loss, parameters, create_graph=True)`.

Evidence: https://github.com/pytorch/pytorch/issues/4661, https://github.com/pytorch/pytorch/issues/7343,
https://github.com/akanimax/pro_gan_pytorch/pull/12,
https://github.com/GBLin5566/toward-controlled-generation-of-text-pytorch/issues/9
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA507", name="graph-retained-in-loop", severity=Severity.WARNING)

BAD = """\
import torch


def curvature(model, loader, criterion):
    traces = []
    for x, y in loader:
        criterion(model(x), y).backward(create_graph=True)
        traces.append(sum(p.grad.pow(2).sum().item() for p in model.parameters()))
    return traces
"""

GOOD = """\
import torch


def curvature(model, loader, criterion):
    traces = []
    for x, y in loader:
        grads = torch.autograd.grad(criterion(model(x), y), list(model.parameters()), create_graph=True)
        traces.append(sum(g.pow(2).sum().item() for g in grads))
    return traces
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.GRAPH_RETAINED):
        yield META.finding(each.span, each.symbol, _message(each))


def _message(each: Sighting) -> str:
    if each.how == "second order":
        return (
            f"the graph of `{each.what}` and the gradients hold each other on every turn: "
            "nobody takes the gradients away"
        )
    return f"the graph of `{each.what}` is kept on every turn, and nothing goes through it again"
