"""PA304 switch-not-handed-on: a class with a pool switch builds a pooled child and does not pass the switch.

What: the `__init__` of a class takes a boolean such as `enable_memory_pool` and builds another class of the
project that takes such a switch too, without giving it one: by no keyword that names a pool, not by
position, and not by `*args` or `**kwargs`.

Why: whoever turns the pool on at the top believes that the whole model uses it. The child keeps its own
default, its temporaries stay in plain torch memory, and the measured gain is that of half a model. With a
default of True it is worse: the pool cannot be turned off.

Not reported: children that get a pool (`pool=`, `memory_pool=`) or the switch by position, children that
get it afterwards (`set_memory_pool(self, pool)`, `child.enable_memory_pool = ...`), a value that is
deliberately another one (`enable_memory_pool=False`), children built by a factory, from a config or
outside of `__init__`.

Example:
    class Layer(nn.Module):
        def __init__(self, dim, enable_memory_pool: bool = False):
            super().__init__()
            self.attention = Attention(dim)        # its own enable_memory_pool stays False

Fix: hand the switch on: `Attention(dim, enable_memory_pool=enable_memory_pool)`. Unsafe, for callers
who turn the pool on then get it in the children too.

In the field: nothing in 20,000 files of 19 public packages, true or false; its fixtures are all that shows
it at work. It is on because it is quiet (docs/field-notes-integration.md).
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts
from auditor.model import Finding, FixOffer, Severity, Step
from auditor.rule import Meta

META = Meta(code="PA304", name="switch-not-handed-on", severity=Severity.WARNING)

_CHILD = """\
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, enable_memory_pool: bool = False):
        super().__init__()
        self.enable_memory_pool = enable_memory_pool


"""

BAD = (
    _CHILD
    + """\
class Layer(nn.Module):
    def __init__(self, dim, enable_memory_pool: bool = False):
        super().__init__()
        self.enable_memory_pool = enable_memory_pool
        self.attention = Attention(dim)
"""
)

GOOD = (
    _CHILD
    + """\
class Layer(nn.Module):
    def __init__(self, dim, enable_memory_pool: bool = False):
        super().__init__()
        self.enable_memory_pool = enable_memory_pool
        self.attention = Attention(dim, enable_memory_pool=enable_memory_pool)
"""
)


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.pooled:
        if each.children:
            first, *others = each.children
            more = f" and {len(others)} more" if others else ""
            yield META.finding(
                each.entry.span,
                each.entry.qualname,
                f"`{each.entry.name}` takes `{each.entry.switch}` and builds `{first.name}`{more} "
                f"without handing on its `{first.switch}`",
                tuple(
                    Step(
                        child.span.path,
                        child.span.line,
                        child.span.column,
                        f"`{child.name}` is built without `{child.switch}`",
                    )
                    for child in each.children
                ),
            )


def fix(case: Case) -> FixOffer | None:
    from auditor.adopt.repairs.switches import handed_on  # only where there is a finding

    return handed_on(case)
