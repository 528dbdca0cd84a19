"""PA405 allocator-rewritten: several classes carry the same allocating method instead of inheriting it.

What: two or more classes define an allocating method (`_allocate_tensor`, `acquire_buffer`, ...) of at
least three statements whose code is the same but for docstrings, annotations and the names of parameters
and locals.

Why: a pool's rules live in that method: what is below the threshold, what happens out of memory, whether
it is cleared. Copies are corrected one at a time, and the one that was forgotten is where the next leak
is.

Not reported: copies of a whole class (vendored files), methods that only hand the call on, methods that
differ in what they do, the first of the copies (the others name it), inherited methods, abstract ones.

Example:
    class DilatedAttention(nn.Module):
        def _allocate_tensor(self, shape, dtype): ...      # twelve lines
    class RingAttention(nn.Module):
        def _allocate_tensor(self, shape, dtype): ...      # the same twelve lines

Fix: a mixin that has the method once; `poolaudit adopt` gives a class the standard one. `fix` takes the
copy out where the code was first written in a mixin that the file can import. Unsafe: a base is added.
"""

from collections.abc import Iterator

from auditor.case import Case
from auditor.facts import Facts
from auditor.model import Finding, FixOffer, Severity, Step
from auditor.rule import Meta

META = Meta(code="PA405", name="allocator-rewritten", severity=Severity.INFO)

_CLASS = """\
class {name}:
    def __init__(self, memory_pool):
        self.memory_pool = memory_pool

    def _allocate_tensor(self, shape, dtype):
        if self.memory_pool is None:
            return torch.empty(shape, dtype=dtype)
        return self.memory_pool.allocate(shape, dtype)


"""

BAD = "import torch\n\n\n" + _CLASS.format(name="Ring") + _CLASS.format(name="Dilated")
GOOD = (
    "import torch\n\n\n"
    + _CLASS.format(name="Pooled")
    + "class Ring(Pooled):\n    size = 4\n\n\nclass Dilated(Pooled):\n    size = 8\n"
)


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.repeated_allocators:
        place, its = each.first_allocator.span, each.first_allocator.name
        more = f", and {each.more} more of its methods" if each.more else ""
        yield META.finding(
            each.entry.span,
            each.entry.qualname,
            f"`{each.entry.name}.{each.allocator.name}` is `{each.first.name}.{its}` written again{more}",
            (
                Step(place.path, place.line, place.column, f"`{each.first.name}.{its}`, first written here"),
                Step(
                    each.allocator.span.path,
                    each.allocator.span.line,
                    each.allocator.span.column,
                    "and again here",
                ),
            ),
        )


def fix(case: Case) -> FixOffer | None:
    from auditor.adopt.repairs.copies import inherited  # only where there is a finding

    return inherited(case)
