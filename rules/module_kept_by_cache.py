"""PA504 module-kept-by-cache: `functools.cache` or `lru_cache` keeps a module or a tensor alive.

What: the decorator is on a method of an `nn.Module`, so that self is part of every key; or on a function
with a parameter that is annotated as a module or a tensor.

Why: the cache belongs to the class or the file and lives as long as the process. It holds every module it
was asked about (`maxsize` of them), with all parameters, and the tensors it answered with. A tensor as
key is compared by identity: it is kept, and hit only by the very same object.

In production: `del model`, garbage collection and `empty_cache()` do not give the memory back; a second
model does not fit where it did in a fresh process; in tests the GPU fills up file by file.

Decorators of the project that hand the function on to `lru_cache` are known as what they are.

Not reported: tensors that may be None, `cached_property` and caches on the instance, static methods,
functions of plain values, classes that are no modules (a linter's rule for those is B019), `pydantic`
models.

Example:
    class Decoder(nn.Module):
        @lru_cache(maxsize=32)
        def anchors(self, height, width): ...

Fix: cache in a function of the sizes alone, or in an attribute of the instance.

Evidence: https://github.com/huggingface/transformers/pull/45708 (85 MB held after del),
https://github.com/pytorch/pytorch/pull/149354, https://github.com/facebookresearch/ParlAI/pull/2487,
https://github.com/pytorch/pytorch/pull/147233
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA504", name="module-kept-by-cache", severity=Severity.WARNING)

BAD = """\
from functools import lru_cache

import torch
from torch import nn


class Decoder(nn.Module):
    @lru_cache(maxsize=32)
    def rows(self, height):
        return torch.linspace(0, 1, height)

    def forward(self, x):
        return x + self.rows(x.shape[-1])
"""

GOOD = """\
from functools import lru_cache

import torch
from torch import nn


@lru_cache(maxsize=32)
def rows(height):
    return torch.linspace(0, 1, height)


class Decoder(nn.Module):
    def forward(self, x):
        return x + rows(x.shape[-1])
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.OBJECT_CACHED):
        yield META.finding(each.span, each.symbol, _message(each))


def _message(each: Sighting) -> str:
    if each.how == "on a method":
        return f"the cache of `{each.where}` keeps every `{each.what}` that was asked, parameters included"
    return f"the cache of `{each.where}` keeps every `{each.what}` that it was given"
