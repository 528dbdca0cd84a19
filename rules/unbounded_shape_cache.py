"""PA508 unbounded-shape-cache: tensors are cached for every shape that ever comes by.

What: a dict on self or in the module, called a cache, gets a tensor under a key that is made of sizes of
the data (`x.shape[1]`, `seq_len`, `(h, w)`), and nothing ever takes an entry out; or `@cache` or
`@lru_cache(maxsize=None)` is on a function from such sizes to a tensor.

Why: variable-length data has as many shapes as lengths. Masks and position tables are quadratic or wide,
so the cache ends up larger than the model, and it is never garbage: all of it is reachable.

In production: memory rises quickly at first, then ever more slowly as new lengths get rare; a long prompt
or an odd image size costs memory for good.

Not reported: caches with a limit (`len(cache)`, `popitem`, a test against a bound before the store), keys
of devices, dtypes, or the model's own widths, values of one row (`torch.arange(n)`), a cache of the
longest only.

Example:
    if n not in self.cache:
        self.cache[n] = torch.full((n, n), -torch.inf).triu_(1)

Fix: keep the longest and slice it, or an `OrderedDict` with a limit.

Evidence: https://github.com/lucidrains/rotary-embedding-torch/issues/15,
https://github.com/unslothai/unsloth/pull/7678, https://github.com/LibreYOLO/libreyolo/pull/541
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA508", name="unbounded-shape-cache", severity=Severity.WARNING)

BAD = """\
import torch
from torch import nn


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask_cache = {}

    def forward(self, scores):
        n = scores.shape[-2]
        if n not in self.mask_cache:
            self.mask_cache[n] = torch.ones(n, n, dtype=torch.bool).triu_(1)
        return scores.masked_fill(self.mask_cache[n], float("-inf"))
"""

GOOD = """\
import torch
from torch import nn


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.longest = torch.ones(0, 0, dtype=torch.bool)

    def forward(self, scores):
        n = scores.shape[-2]
        if self.longest.shape[0] < n:
            self.longest = torch.ones(n, n, dtype=torch.bool).triu_(1)
        return scores.masked_fill(self.longest[:n, :n], float("-inf"))
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.SHAPES_CACHED):
        yield META.finding(each.span, each.symbol, _message(each))


def _message(each: Sighting) -> str:
    if each.how == "by decorator":
        return f"the cache of `{each.where}` has no limit: it keeps a tensor for every `{each.what}` it meets"
    return f"`{each.where}` keeps a tensor for every `{each.what}` that ever comes by; nothing takes one out"
