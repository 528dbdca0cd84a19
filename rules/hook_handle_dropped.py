"""PA503 hook-handle-dropped: a hook is registered again and again, and nobody can remove it.

What: `register_forward_hook` and its siblings return a handle; without it the hook stays as long as the
module. Reported where the handle is dropped and the registration is repeated: in `forward` or a step
method on a field of self; in a function that hooks a module which it was given (or keeps on self) and
then runs it; in a loop that hooks the same module every turn.

Why: each call adds one more hook. All of them run on every forward pass, and whatever they close over
(lists of activations, a trainer) stays alive with the module.

In production: calls become slower one by one, features arrive twice, three times, memory of captured
activations never comes back, although each call looks complete.

Not reported: constructors and functions that set a module up once, modules made in the same function,
hooks on this step's tensors (they die with the graph), handles that are stored or returned, files that
empty `_forward_hooks` themselves, tests.

Example:
    def features(encoder, image):
        kept = []
        encoder.layer4.register_forward_hook(lambda m, i, o: kept.append(o))
        encoder(image)
        return kept[0]                 # the second call keeps both, the third all three

Fix: `handle = ...`, and `handle.remove()` in a finally; or `with module.register_forward_hook(...):`.

Evidence: https://github.com/KamitaniLab/bdpy/pull/91,
https://github.com/NeuroBench/neurobench/issues/184, https://github.com/fffasttime/MRFI/pull/5,
https://github.com/pytorch/pytorch/issues/191191
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA503", name="hook-handle-dropped", severity=Severity.WARNING)

BAD = """\
import torch


def features(encoder, image):
    kept = []
    encoder.layer4.register_forward_hook(lambda module, inputs, output: kept.append(output))
    encoder(image)
    return kept[0]
"""

GOOD = """\
import torch


def features(encoder, image):
    kept = []
    with encoder.layer4.register_forward_hook(lambda module, inputs, output: kept.append(output)):
        encoder(image)
    return kept[0]
"""

_WHEN = {
    "each call": "every call of this method adds one more",
    "before a run": "it stays when this function has run the module, and the next call adds one more",
    "each turn": "every turn of the loop adds one more",
}


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.HOOK_DROPPED):
        yield META.finding(each.span, each.symbol, _message(each))


def _message(each: Sighting) -> str:
    dropped = f"nobody can remove the hook on `{each.what}` (the handle of `{each.where}` is dropped)"
    return f"{dropped}: {_WHEN[each.how]}"
