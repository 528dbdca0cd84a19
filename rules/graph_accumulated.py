"""PA501 graph-accumulated: losses or outputs are summed or collected with their graph attached.

What: in a loop that calls `backward()`, the loss (or a part of it, or the network's output) is added to a
sum or appended to a container that outlives the turn, without `.item()`, `float(...)` or `.detach()`. The
same in a loop that evaluates (`model.eval()` or a function called evaluate, validate, test) with
gradients on.

Why: the sum is a tensor whose graph leads to every earlier loss. After `backward()` only the nodes of the
graphs stay, no activations: about 2 kB for each layer of the network and each step (measured: 210 kB a
step with 100 linear layers), so it is small in a small network and never stops before the epoch ends.
Where nobody goes back, the activations of every step stay as well.

In production: host memory that climbs by the same amount each step and falls back when the epoch ends;
with evaluation, CUDA out of memory after a number of batches that depends on the validation set.

Not reported: sums that `backward()` or `autograd.grad` goes through later, sums that are made or emptied
in the turn, `deque(maxlen=...)`, anything cut off before it is added, code under `no_grad` (in the
function, or in all its callers of the file), tests.

Example:
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        running += loss                # AddBackward0 -> AddBackward0 -> ... -> the first step's graph

Fix: add `loss.detach()`, or `loss.item()` where a number is needed anyway (it waits for the GPU).

Evidence: https://github.com/pytorch/pytorch/issues/144181 (3 MB a step),
https://github.com/huggingface/transformers/pull/6999, https://github.com/ray-project/ray/pull/40940,
https://github.com/BatsResearch/labelmodels/issues/4, https://github.com/pytorch/pytorch/pull/6017
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA501", name="graph-accumulated", severity=Severity.WARNING)

BAD = """\
import torch


def train(model, loader, criterion, optimizer):
    running = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        running += loss
    return running
"""

GOOD = """\
import torch


def train(model, loader, criterion, optimizer):
    running = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        running += loss.detach()
    return running
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.GRAPH_KEPT):
        yield META.finding(each.span, each.symbol, _message(each), each.steps)


def _message(each: Sighting) -> str:
    kept = f"`{each.where}` keeps the graph of every `{each.what}`"
    if each.how == "after backward":
        return f"{kept}: its nodes, some kilobytes a layer and step, for backward has freed what they saved"
    return f"{kept}, activations included: gradients are on and nobody goes back"
