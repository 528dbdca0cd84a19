"""PA207 released-to-other-pool: a lease is given back to a pool that it did not come from.

**What.** The release is called on another pool than the acquire: two fields of one object, two parameters,
two locals whose names say that they are two pools of one kind.

**Why.** The pool that handed it out counts it as lent for ever; the other one hands out memory that is not
its own, of another device or another lifetime perhaps. Pools that check raise; the others break when the
first one is closed.

**Not reported.** Two names of one pool, `pool` beside `self.pool`, a pool chosen by a condition, and a
wrapper that takes from any of several pools.

**Example.** Keys and values change places:

```python
def exchange(self, shape):
    keys = self.key_pool.allocate(shape)
    keys.zero_()
    self.value_pool.deallocate(keys)
```

**Fix.** None yet."""

from collections.abc import Iterator

from auditor.facts import Facts, Fault
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA207", name="released-to-other-pool", severity=Severity.ERROR)
BAD = """def move(source_pool, target_pool, shape):
    block = source_pool.allocate(shape)
    block.zero_()
    target_pool.deallocate(block)
"""
GOOD = """def move(source_pool, target_pool, shape):
    block = source_pool.allocate(shape)
    source_pool.deallocate(block)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for misuse in facts.misuses:
        if misuse.fault is Fault.OTHER_POOL:
            message = f"{misuse.lease} is released to another pool than it came from"
            yield META.finding(misuse.span, misuse.symbol, message, misuse.trace)
