"""PA512 gradients-in-inference: a loop only reads what the network says, and gradients are on.

What: a model is put into evaluation (`model.eval()`) and run in a loop whose code calls no backward,
takes no optimizer step and asks nothing for its gradient, without `no_grad` or `inference_mode` around
it, on the function, or around every call of the function in the file.

Why: `eval()` changes dropout and normalisation, not autograd. Every forward pass saves its activations
for a backward pass that never comes: its peak is that of a training step's forward, where it could be a
layer or two, and whatever is kept of its output keeps all of that too.

In production: validation runs out of memory with a batch size that trains; outputs collected in a list
fill the GPU after some hundred batches.

Not reported: loops that go back or differentiate (saliency, adversarial examples), models whose
parameters were told `requires_grad_(False)`, results that nobody reads (`_ = model(x)`), callers that
switch gradients off, tests.

Example:
    model.eval()
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum().item()

Fix: `with torch.inference_mode():` around the loop, or the decorator on the function.

Evidence: https://github.com/pytorch/pytorch/issues/4932, https://github.com/hszhao/semseg/issues/60,
https://github.com/zhanhz/PC-NBV_pytorch/issues/3, https://github.com/pytorch/serve/pull/501
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA512", name="gradients-in-inference", severity=Severity.WARNING)

BAD = """\
import torch


def accuracy(model, loader):
    model.eval()
    correct = 0
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum().item()
    return correct
"""

GOOD = """\
import torch


@torch.inference_mode()
def accuracy(model, loader):
    model.eval()
    correct = 0
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum().item()
    return correct
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.GRADIENTS_ON):
        message = (
            f"`{each.what}` is in evaluation and run with gradients on: "
            "every pass saves activations that nobody goes back through"
        )
        yield META.finding(each.span, each.symbol, message)
