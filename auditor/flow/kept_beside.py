"""What a function keeps of the work it did with a lease, and gives the lease back all the same.

`out = self.run(buffer)`, `self.results[key] = out`, `pool.free(buffer)`: who wrote that knows that `out` is
no buffer. Where some way does not give it back after that, what is kept may be its new holder."""

from auditor.flow.held import Held
from auditor.flow.ownership import Ownership
from auditor.flow.solve import Solution
from auditor.ir.ops import Path


def kept_beside(domain: Ownership, solution: Solution[Held]) -> frozenset[str]:
    """Names of what was kept, in a lease that was followed with all calls believed."""
    endings = domain.endings
    ended = {place for held in endings.released.values() for place in held.maybe}
    other = {place for _, _, held in endings.lost for place in held.maybe if not held.to_come}
    for node in (*endings.returned, *endings.stored, *endings.taken, *endings.unknown):
        other.update(place for held in solution.states.get(node, ()) for place in held.maybe)
    return frozenset(name for name, to in domain.kept_perhaps if to in ended and not _met(to, other))


def _met(place: Path, others: set[Path]) -> bool:
    return any(other[: len(place)] == place for other in others)
