"""One lease as a state of the analysis: the places that hold it, and what became of it over all paths."""

from dataclasses import dataclass, field, replace

from auditor.flow.lease import Loss
from auditor.flow.limits import TooManyStates
from auditor.ir.ops import RESULT, TO_COME, Path

Places = frozenset[Path]
NOWHERE: Places = frozenset()
PATH_LENGTH = 6
PLACES_PER_STATE = 24


@dataclass(frozen=True, slots=True)
class Held:
    """One lease as it is held. `maybe` are places that may hold it too; `seen` are loops that looked at it.

    `lent` after a yield of it; `stale` once its own acquire has run again; `kept` once more than an
    intermediate value held it; `noted` are lists that are not empty then: the loop that it was
    acquired in goes over them, or something was written down in them since. `counted` once somebody
    has counted himself as a user too: the next to keep it or to count down does so for him. `parted`: it
    stands for those of a list that a part taken of it has left, and for nothing that may be in that part."""

    places: Places
    maybe: Places = NOWHERE
    seen: frozenset[int] = frozenset()
    lent: bool = False
    stale: bool = False
    kept: bool = False
    noted: frozenset[Path] = frozenset()
    counted: bool = False
    parted: bool = False
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        """Hashed once: a step of the analysis looks up its state five times."""
        flags = self.lent, self.stale, self.kept, self.counted, self.parted
        object.__setattr__(self, "_hash", hash((self.places, self.maybe, self.seen, self.noted, flags)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def to_come(self) -> bool:
        """Whether it is in a generator that was not asked for it, so that nothing is owed yet."""
        return all(TO_COME in place for place in self.places)


@dataclass(slots=True)
class Endings:
    """What happened to the lease over all paths, with the states from which it did."""

    lost: list[tuple[Loss, int, Held]] = field(default_factory=list)
    released: dict[int, Held] = field(default_factory=dict)
    sometimes: set[int] = field(default_factory=set)  # calls that give it back on some of their own ways only
    chosen: bool = False  # a function that is made here gives it back if whoever calls it says so
    returned: dict[int, Path] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)  # of those returned: where others have it as well
    stored: dict[int, Path] = field(default_factory=dict)
    beside: set[tuple[int, Path]] = field(default_factory=set)  # where else it lies then, the result included
    together: set[frozenset[Path]] = field(default_factory=set)  # of those, what holds it on one way
    written: set[int] = field(default_factory=set)  # put into an argument, which may still be emptied here
    taken: set[int] = field(default_factory=set)
    later: dict[int, Held] = field(default_factory=dict)  # of those taken: by functions that give it back
    returned_too: set[Path] = field(default_factory=set)  # other fields of what is returned
    yielded: dict[int, Path] = field(default_factory=dict)  # where in what is yielded, and nowhere else
    unknown: set[int] = field(default_factory=set)
    shown: dict[int, Path] = field(default_factory=dict)  # of those unknown: what is returned may lead to it
    kept: set[int] = field(default_factory=set)  # what others can reach is put where others can find it
    noted: set[tuple[int, Path]] = field(default_factory=set)  # where that is
    going_on: dict[int, Path] = field(default_factory=dict)  # where it lies when the acquire runs again

    @property
    def left_in(self) -> dict[int, Path]:
        """Where it lies when the function is done with it, or, of one that never ends, with this turn."""
        done = self.stored or self.released or self.returned or self.lost
        return self.stored if done else self.going_on

    @property
    def comes_back(self) -> bool:
        """Its caller has it, perhaps among others that are left where they were."""
        return bool(self.returned) or any(path[:1] == RESULT for _, path in self.beside)

    @property
    def is_somebodys(self) -> bool:
        """It is given back, or others have it now, or may have it."""
        return bool(self.unknown or self.taken or self.released or self.later) or self.comes_back

    @property
    def handed_over(self) -> bool:
        return bool(self.returned or self.stored or self.taken)


def limited(held: Held) -> Held:
    """Keeps states finite where a container is put into itself again and again. Raises TooManyStates."""
    if len(held.places) + len(held.maybe) > PLACES_PER_STATE:
        raise TooManyStates
    if all(len(place) <= PATH_LENGTH for place in held.places | held.maybe):
        return held
    shortened = [frozenset(place[:PATH_LENGTH] for place in places) for places in (held.places, held.maybe)]
    return replace(held, places=shortened[0], maybe=shortened[1] - shortened[0])
