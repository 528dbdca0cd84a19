"""The calls that really acquire or release, as the flow analysis recognised them, by class."""

from collections.abc import Iterable
from dataclasses import dataclass

from auditor.model import Span


@dataclass(frozen=True, slots=True)
class PoolCall:
    """One such call. `owner` is the class whose method makes it, `method` that method's name.

    `on_self` is whether the receiver is the object itself: `self._allocate_tensor(...)`. `speaks` is whether
    its name says what it does: `self.scores(x)` may return a lease, but nobody would rename it.
    """

    span: Span
    owner: str
    method: str
    name: str
    releases: bool
    on_self: bool
    speaks: bool = True


def outside_of_wrappers(calls: Iterable[PoolCall]) -> list[PoolCall]:
    """Calls of a class whose names say what they do, but not those inside methods that it so calls itself."""
    made = [call for call in calls if call.speaks]
    own = {call.name for call in made if call.on_self}
    return [call for call in made if call.method not in own]
