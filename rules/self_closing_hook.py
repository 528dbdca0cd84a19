"""PA509 self-closing-hook: a hook closes over the very tensor or module that it hangs on.

What: `t.register_hook(f)` where `f`, a lambda or a local function, reads `t` itself, and `t` is the
result of an operation; or `self.register_forward_hook(f)` (and its siblings) where `f` reads self.

Why: the tensor holds its node, the node the hook, the hook the tensor. The part between node and hook is
C++, which Python's collector does not look through: neither `backward()`, `del` nor `gc.collect()` ever
frees the tensor, and the graph behind it stays too. A module's circle is found by the collector, but its
parameters stay on the GPU until that happens to run, and a deep copy of it keeps calling the original.

In production: memory up by one activation and its graph with each step, although nothing in Python refers
to them; models that stay on the GPU after `del model` until something calls `gc.collect()`.

Not reported: hooks that read a detached copy or a number, weak references, bound methods, hooks of one
module that read another; leaf tensors, whose hooks the collector can see.

Example:
    features = encoder(x)
    features.register_hook(lambda grad: grad / features.norm())

Fix: compute what the hook needs before it (`norm = features.detach().norm()`); in a module's hook use the
module that it is given.

Evidence: https://github.com/pytorch/pytorch/issues/12863,
https://github.com/pytorch/pytorch/issues/46386, https://github.com/pytorch/pytorch/pull/102859,
https://github.com/jacobgil/pytorch-grad-cam/issues/88
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA509", name="self-closing-hook", severity=Severity.WARNING)

BAD = """\
import torch


def normalised(encoder, x):
    features = encoder(x)
    features.register_hook(lambda grad: grad / features.norm())
    return features
"""

GOOD = """\
import torch


def normalised(encoder, x):
    features = encoder(x)
    norm = features.detach().norm()
    features.register_hook(lambda grad: grad / norm)
    return features
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.HOOK_CLOSED):
        yield META.finding(each.span, each.symbol, _message(each))


def _message(each: Sighting) -> str:
    if each.how == "of the module":
        return "the hook on `self` reads `self`: the module waits for the garbage collector to be freed"
    return (
        f"the hook on `{each.what}` reads `{each.what}`: the two hold each other, and no collector frees them"
    )
