"""PA505 exception-kept-alive: a caught exception holds the tensors of the step that failed.

What: out of memory is caught and the same call is tried again inside the handler (or the function calls
itself there); or the exception itself, not its text, is stored on self or in a container after a step
that ran a network.

Why: an exception has a traceback, the traceback has the frames, and the frames have every local of the
failed call: activations, inputs, half a graph. While a handler runs its exception lives, so the retry has
to fit beside what just did not fit. `empty_cache()` does not help: none of it is free.

In production: halving the batch on out of memory fails again and again down to a batch of one, though a
fresh process runs that batch; or memory is lost with each failed trial of a sweep.

Not reported: retries after the handler (a flag, a loop), handlers that clear the traceback or go to the
CPU, calls into torch itself (they have no frames), exceptions stored as text.

Example:
    try:
        return model(batch)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return torch.cat([model(part) for part in batch.chunk(2)])     # the failed forward is still held

Fix: leave the handler first (`too_large = True`), then try again; store `str(error)`, or
`error.with_traceback(None)`.

Evidence: https://github.com/pytorch/pytorch/issues/18853 (its first paragraph),
https://github.com/pytorch/pytorch/issues/27600, https://github.com/pytorch/pytorch/issues/10348,
https://github.com/pytorch/pytorch/pull/182980
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA505", name="exception-kept-alive", severity=Severity.WARNING)

BAD = """\
import torch


def forward(model, batch):
    try:
        return model(batch)
    except torch.cuda.OutOfMemoryError:
        return torch.cat([model(part) for part in batch.chunk(2)])
"""

GOOD = """\
import torch


def forward(model, batch):
    try:
        return model(batch)
    except torch.cuda.OutOfMemoryError:
        too_large = True
    if too_large:
        return torch.cat([model(part) for part in batch.chunk(2)])
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.EXCEPTION_HELD):
        yield META.finding(each.span, each.symbol, _message(each), each.steps)


def _message(each: Sighting) -> str:
    if each.how == "kept":
        return f"`{each.where}` keeps `{each.what}`, whose traceback holds the tensors of the failed step"
    return (
        f"`{each.what}` is tried again inside the handler, "
        "while the exception still holds the tensors of the failed call"
    )
