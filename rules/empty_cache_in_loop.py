"""PA511 empty-cache-in-loop: the allocator's cache is emptied on every step.

What: `torch.cuda.empty_cache()` (or another device's) runs unconditionally on each turn of a training or
prediction loop, or in a method that is one training step.

Why: it frees nothing that the program uses. It gives the blocks that the next step is about to ask for
back to the driver, waits for the device, and has them allocated again: `cudaMalloc` for each size, every
step. Where memory seems to need it, something else is held too long; that is what to look for.

In production: the GPU idles between steps while the host waits in cudaFree and cudaMalloc; reserved
memory zigzags, allocated memory is as before.

Not reported: once an epoch, every so many steps or under another condition, in a handler of out of memory
or a finally, between models or layers that come and go.

Example:
    for batch in loader:
        model(batch).loss.backward()
        optimizer.step()
        torch.cuda.empty_cache()

Fix: delete the call. Against fragmentation set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.

Evidence: https://github.com/huggingface/transformers/issues/31372 and
https://github.com/huggingface/transformers/pull/31530 (removed from the Trainer after slowdowns),
https://github.com/2U1/Qwen-VL-Series-Finetune/issues/136
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA511", name="empty-cache-in-loop", severity=Severity.WARNING)

BAD = """\
import torch


def train(model, loader, optimizer):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).loss.backward()
        optimizer.step()
        torch.cuda.empty_cache()
"""

GOOD = """\
import torch


def train(model, loader, optimizer):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).loss.backward()
        optimizer.step()
    torch.cuda.empty_cache()
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.CACHE_EMPTIED):
        yield META.finding(each.span, each.symbol, _message(each))


def _message(each: Sighting) -> str:
    turn = "training step" if each.how == "training" else "batch"
    return f"`{each.what}` on every {turn}: the blocks that the next one needs go back to the driver first"
