"""PA510 recording-left-on: the memory history or a profiler is switched on and never off.

What: `_record_memory_history()` without a limit, in a file that never switches it off; a profiler that is
started in a file that never stops it; `with profile(...)` without a schedule around a whole training
loop.

Why: each of them keeps a record of every allocation or operation, stacks included, in host memory until
it is told to stop. A profiler without a schedule writes nothing out before its block ends.

In production: host memory, not the GPU's, climbs by megabytes a step until the machine kills the process;
steps get slower; nothing that is trained or allocated explains it.

Not reported: a history with `max_entries`, one that is switched off anywhere in the file or whose switch
is a variable, profilers with a schedule, loops of at most a hundred turns or with a break, tests.

Example:
    torch.cuda.memory._record_memory_history()
    train(model)                                     # still recording when this returns, and all the while

Fix: `_record_memory_history(enabled=None)` in a finally, or `max_entries=`; `schedule=` and
`prof.step()`.

Evidence: https://github.com/meta-pytorch/torchtune/pull/2522,
https://github.com/Lightning-AI/pytorch-lightning/issues/10717,
https://github.com/pytorch/pytorch/issues/193348
"""

from collections.abc import Iterator

from auditor.facts import Facts, Kind, Sighting
from auditor.model import Finding, Severity
from auditor.rule import Meta

META = Meta(code="PA510", name="recording-left-on", severity=Severity.WARNING)

BAD = """\
import torch


def record(step, batches):
    torch.cuda.memory._record_memory_history()
    for batch in batches:
        step(batch)
    torch.cuda.memory._dump_snapshot("memory.pickle")
"""

GOOD = """\
import torch


def record(step, batches):
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        for batch in batches:
            step(batch)
        torch.cuda.memory._dump_snapshot("memory.pickle")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for each in facts.sightings(Kind.RECORDING_ON):
        yield META.finding(each.span, each.symbol, _message(each))


def _message(each: Sighting) -> str:
    match each.how:
        case "history":
            return "the memory history is recorded without a limit, and nothing in this file switches it off"
        case "started":
            return f"`{each.what}` is started, and nothing in this file stops it"
        case _:
            return "the profiler keeps the whole training until its block ends: it has no schedule"
