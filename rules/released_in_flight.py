"""PA208 released-in-flight: a lease goes back to its pool while something else may still be using it.

**What.** Between a copy with `non_blocking=True`, an operation on another stream, or a transfer whose
handle is still open (`isend`, `irecv`, `async_op=True`) and the release nothing waits.

**Why.** The call has returned, the work has not been done. The block's next owner writes into it while the
device still reads, or has its values overwritten by what arrives late. No error is raised, and a debugger
makes it go away.

**Not reported.** Releases after `synchronize()`, `wait()` of the handle, `wait_stream`, an event's wait,
`record_stream`, or a read that waits by itself (`item()`); `non_blocking` and `async_op` that are
variables; a handle that somebody else was given.

**Example.** The pinned source is handed out again before the device has read it:

```python
def upload(pool, source, device):
    staging = pool.allocate(source.shape)
    staging.copy_(source)
    target = staging.to(device, non_blocking=True)
    pool.deallocate(staging)
    return target
```

**Fix.** None yet. Wait first, or release in a callback of the event."""

from collections.abc import Iterator

from auditor.facts import Facts, Fault
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA208", name="released-in-flight", severity=Severity.WARNING)
BAD = """def upload(pool, source, device):
    staging = pool.allocate(source.shape)
    staging.copy_(source)
    target = staging.to(device, non_blocking=True)
    pool.deallocate(staging)
    return target
"""
GOOD = """import torch

def upload(pool, source, device):
    with pool.lease(source.shape) as staging:
        staging.copy_(source)
        target = staging.to(device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return target
"""

UNFINISHED = {
    "copy": "a copy that does not block",
    "stream": "another stream",
    "transfer": "a transfer that nobody has waited for",
}


def check(facts: Facts) -> Iterator[Finding]:
    for misuse in facts.misuses:
        if misuse.fault is Fault.IN_FLIGHT:
            message = f"{misuse.lease} is released while {UNFINISHED[misuse.why]} may still use it"
            yield META.finding(misuse.span, misuse.symbol, message, misuse.trace)
