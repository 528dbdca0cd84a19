"""PA502 recurrent-state-attached: a recurrent state goes into the next turn together with its graph.

What: a hidden state that one turn of a training loop returns is given to the next one and never cut off;
or a module keeps the state of its LSTM, GRU or RNN on self, feeds it back in, and nothing in the file
detaches or resets it.

Why: the state leads to the graph of every turn before it. A plain `backward()` then fails in the second
turn ("Trying to backward through the graph a second time"); with `retain_graph=True`, or without
gradients being asked for, nothing fails and every turn's activations stay.

In production: step time and memory grow in a straight line with the number of batches since the start, on
the same data, with the same shapes.

Not reported: states that are detached or made anew in the turn, by a method of the class or by whoever
holds the module; unrolling within one step (the state starts in the turn that goes back); `no_grad`.

Example:
    for text, target in loader:
        out, hidden = model(text, hidden)
        criterion(out, target).backward(retain_graph=True)

Fix: `hidden = hidden.detach()` (each part of a tuple) before it is used again: truncated backpropagation.

Evidence: https://github.com/pytorch/pytorch/issues/2198,
https://github.com/mravanelli/pytorch-kaldi/pull/41, https://github.com/sgadgil6/cnslab_fmri/issues/4,
https://github.com/MorvanZhou/PyTorch-Tutorial/issues/57
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA502", name="recurrent-state-attached", severity=Severity.WARNING)

BAD = """\
import torch


def train(model, loader, criterion, optimizer, hidden):
    for text, target in loader:
        optimizer.zero_grad()
        out, hidden = model(text, hidden)
        criterion(out, target).backward(retain_graph=True)
        optimizer.step()
"""

GOOD = """\
import torch


def train(model, loader, criterion, optimizer, hidden):
    for text, target in loader:
        optimizer.zero_grad()
        out, hidden = model(text, hidden.detach())
        criterion(out, target).backward()
        optimizer.step()
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.STATE_CARRIED):
        yield META.finding(each.span, each.symbol, _message(each), each.steps)


def _message(each: Sighting) -> str:
    if each.how == "on self":
        kept = f"`{each.where}` keeps the state of `{each.what}` for the next call, graph included"
        return f"{kept}; nothing detaches or resets it"
    return f"`{each.where}` goes into the next turn with the graph of all turns before"
