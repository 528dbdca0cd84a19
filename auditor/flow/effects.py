"""What calls do to the leases that reach them: the questions the ownership domain asks of the project."""

import ast
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from auditor.ir.ops import TO_COME, Call, Path

Position = int | str
"""Which operand of a call: -1 the receiver, 0.. positional arguments, a keyword's name, or `<name>`
captured."""


class Fate(Enum):
    """What becomes of a lease that a call is given."""

    BORROW = "borrow"
    RELEASE = "release"
    TAKE = "take"  # stored, queued, handed to a task: somebody else ends it
    UNKNOWN = "unknown"  # cannot be told: no finding is better than a guess


@dataclass(frozen=True, slots=True)
class Treatment:
    """`result` says where in the call's result the lease is found (`()`: the result itself), None for
    nowhere.

    `maybe` marks a result that may be the same object. `moved_to` is the place that now holds it as well;
    `leaves` tells that the operand's own place no longer does (`list.pop`).
    `split`: on some ways through the callee this happens, on others nothing does; the two are followed apart.
    `says`: what is known of the call's result then, without its name.
    `later`: what takes it is a function that gives it back when it is called.
    """

    fate: Fate = Fate.BORROW
    result: Path | None = None
    maybe: bool = False
    moved_to: Path | None = None
    leaves: bool = False
    split: bool = False
    says: frozenset[tuple[str, bool]] = frozenset()
    later: bool = False


BORROWED = Treatment()
RELEASED = Treatment(Fate.RELEASE)
TAKEN = Treatment(Fate.TAKE)
RELEASED_LATER = Treatment(Fate.TAKE, later=True)
UNKNOWN = Treatment(Fate.UNKNOWN)
SAME = Treatment(result=())
PERHAPS_SAME = Treatment(result=(), maybe=True)


class Handle(Enum):
    """What stands for the obligation."""

    RESULT = "result"
    RECEIVER = "receiver"
    ARGUMENT = "argument"
    NONE = "none"


class Value(Enum):
    """Whether copies carry the obligation (design: rebinding is not escape)."""

    TENSOR = "tensor"
    OBJECT = "object"
    INDEX = "index"
    AMOUNT = "amount"  # a number that says how much: who is told it has nothing


@dataclass(frozen=True, slots=True)
class Acquisition:
    """A recognised acquire call. `places` are where the lease is held right after it."""

    protocol: str
    handle: Handle
    value: Value
    places: tuple[Path, ...]
    text: str
    managed: bool = False  # entered by `with`, so it gives back by itself
    declared: bool = True  # by settings or a built-in table, not found in the tree
    foreign: bool = False  # by a built-in table: what others know of it, this tree does not say
    flags: frozenset[tuple[str, bool]] = frozenset()  # items of the result known to be true or false with it
    inner: bool = False  # the class's own private helper: its bookkeeping, and nobody else's
    counts: bool = False  # one more user of an object that has others
    listed: frozenset[Path] = frozenset()  # where loops around it find what they mark, one after the other
    own_key: bool = False  # the object that stands for it was made in this function
    own: frozenset[tuple[str, bool]] = frozenset()  # what is true of the receiver's fields where it lends
    given: frozenset[tuple[str, bool]] = frozenset()  # what is true of the call's arguments where it lends
    recorded: bool = False  # in a table of the object that lends: who does not want it may leave it there
    fresh: bool = False  # the object that it lies in was made for whoever gets it
    opened: bool = False  # an object of the tree that holds something open
    telling: frozenset[str] = frozenset()  # fields that tell about it, and are no way to it
    plain: bool = False  # a row of numbers: what is taken out of it, or made of it, is a copy
    from_zero: bool = False  # a number, and 0 is one of them
    zero_is_none: bool = False  # a number, and 0 is said where there is none
    helped: bool = False  # taken in the function that is called, whose answer says what it likes
    shared: bool = False  # the pool may lend the same to others, and counts them
    until: frozenset[int] = frozenset()  # nodes that end all that its pool has lent since
    several: bool = False  # a list or a tensor of numbers: what a table has under it is a copy

    @property
    def keyed(self) -> bool:
        """The obligation is on an object that others can reach too: its release may be anywhere."""
        return self.handle is not Handle.RESULT and not self.own_key

    @property
    def by_generator(self) -> bool:
        """One after the other, as they are asked for."""
        return any(TO_COME in place for place in self.places)

    @property
    def single(self) -> bool:
        """A lease of which it can be said that it was ended before, and by what."""
        return not self.opened and not self.by_generator


class Effects(Protocol):
    """Answered by the project: resolution, protocols and summaries."""

    def acquisition(self, call: Call) -> Acquisition | None:
        """The lease this call starts, if it does."""

    def treatment(self, call: Call, position: Position, rest: Path, value: Value, protocol: str) -> Treatment:
        """What the call does to a lease found at `rest` inside the operand at `position`."""

    def dies_with_its_object(self, place: Path) -> bool:
        """Whether nobody has what lies there, in a field of the function's own object, once it has raised."""

    def forget(self) -> None:
        """What calls do has to be asked again: more is known of recursive functions."""

    def ends_itself(self, protocol: str) -> bool:
        """Whether a method of the lease ends it: then it is no list, and what a loop over it yields is not
        it."""

    def telling(self, protocol: str) -> frozenset[str]:
        """Fields of its leases that tell about them, and are no way to them."""

    def lends_plain_memory(self, protocol: str) -> bool:
        """Whether its leases are rows of numbers, of which every part is a copy."""

    def end_alike(self, one: str, other: str) -> bool:
        """Whether what ends leases of the one protocol may end those of the other."""

    def is_ended_through(self, field: str, protocol: str) -> bool:
        """Whether somebody who has to do with a field of this name, `.active`, ends such leases."""

    def is_named_to_an_end(self, field: str, protocol: str) -> bool:
        """Whether somebody who ends such leases speaks of a field of this name, or hands it on."""

    def ends_its_keys(self, field: str, protocol: str) -> bool:
        """Whether somebody who goes over a table in a field of this name ends such leases by its keys."""

    def is_own_end(self, method: str, protocol: str) -> bool:
        """Whether a method of this name ends such leases: `send(data, on_complete=credits.earn)`."""

    def put_on_a_stack(self, call: Call) -> Treatment | None:
        """`stack.callback(lease.close)`: where a lease lies whose own end the call is given."""

    def is_absorbed(self, added: ast.AST, protocol: str) -> bool:
        """Whether `grant.tokens += extra.tokens` makes one lease of two."""

    def is_memory(self, table: ast.AST) -> bool:
        """Whether `table[slot]` is a row of a tensor, which does not say which slot it is."""

    def owed_behind_its_with(self, context: ast.AST, inside: Path, value: Value, protocol: str) -> bool:
        """Whether `with lease:`, or `with Timed(lease):` in which it lies, leaves it to its taker to give
        it back."""

    def ends_what_was_asked(self, call: Call, begun: Call, protocol: str) -> bool:
        """Whether the call ends, by the same key, what the other one lent."""

    def only_releases(self, call: Call) -> bool:
        """Whether the call gives something back: such calls are not expected to raise."""

    def captured(self, function: object, name: str, rest: Path, value: Value, protocol: str) -> Treatment:
        """What a nested function does to a lease that it takes from its scope, as `@buffer`, or has under the
        name of a parameter as what that is by default; `split` where it ends it if its caller says so."""
