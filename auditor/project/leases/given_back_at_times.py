"""What is counted, reserved or pinned here, and given back on some of its ways by what is started for it:
`task.add_done_callback(done)`, where `done` returns for a task that failed before it gives the permit back.

Such a mark may be anybody's to end, but who names the one that ends it leaves it to nobody else."""

from auditor.flow.held import Endings
from auditor.flow.lease import EXCEPTIONAL, Leak

OTHERS = ("returned", "stored", "taken", "later", "yielded", "unknown", "kept")
"""Ends after which somebody else may see to it."""


def given_back_at_times(endings: Endings, leaks: tuple[Leak, ...]) -> tuple[Leak, ...]:
    """The losses on ordinary ways, where such a call is its one end; of two each may see to its own ways."""
    if len(endings.released) != 1 or not endings.released.keys() <= endings.sometimes:
        return ()
    if any(getattr(endings, each) for each in OTHERS):
        return ()
    return tuple(leak for leak in leaks if leak.loss not in EXCEPTIONAL)
