"""The small operations that Python statements become; every operand is an access path."""

import ast
from dataclasses import dataclass
from enum import Enum, auto

from auditor.ir.standing import ENDS

Path = tuple[str, ...]
"""`("self", ".pool")`, `("blocks", "[*]")`, `("%3",)`: a root name, then attributes and items.

Roots: a local name, `%n` for an intermediate value, `@name` for a module's global.
"""

ANY_ITEM = "[*]"
RESULT: Path = ("%return",)
TO_COME = "[~]"
"""An element of a generator: it begins when it is asked for, and nothing else has it then."""

ITERATED = "iterated~"
"""Begins the hidden name of an intermediate container that a loop goes over."""


class Edge(Enum):
    """Why control goes from one node to the next."""

    NORMAL = auto()
    BODY = auto()  # a loop takes one more element
    EXHAUSTED = auto()  # a loop has no more elements
    CALL_RAISES = auto()
    RAISE = auto()  # raise and assert
    CANCEL = auto()  # CancelledError at an await
    CLOSE = auto()  # GeneratorExit, or an exception thrown in at a yield

    __hash__ = object.__hash__  # asked for at every step, and Enum's own is written in Python


RAISING = frozenset({Edge.CALL_RAISES, Edge.RAISE, Edge.CANCEL, Edge.CLOSE})


class Way(Enum):
    """How a function is left at a `Leave`."""

    RETURN = auto()
    FALL_THROUGH = auto()
    RAISE = auto()


@dataclass(slots=True, eq=False)
class Op:
    """`at` is the syntax that a finding or a trace would point to."""

    at: ast.AST


@dataclass(slots=True, eq=False)
class Nop(Op):
    """A meeting point of edges."""


@dataclass(slots=True, eq=False)
class Move(Op):
    """`target = source`: both name the same object from here on."""

    target: Path
    source: Path
    part: str = ""  # `:n` of `x = source[:n]`, `0` of `x = source[0]`


@dataclass(slots=True, eq=False)
class Constant(Op):
    target: Path
    value: object


@dataclass(slots=True, eq=False)
class Fresh(Op):
    """`target` becomes an object that is none of `uses` (arithmetic, comparison, formatting)."""

    target: Path
    uses: tuple[Path, ...] = ()


@dataclass(slots=True, eq=False)
class Lookup(Op):
    """`target` is what a table holds under `index`: for a number, another name of the same thing."""

    target: Path
    index: Path


@dataclass(slots=True, eq=False)
class Make(Op):
    """A tuple, list, set or dict display; `items` are (component, path), components such as `[0]` or
    `[*]`."""

    target: Path
    items: tuple[tuple[str, Path], ...]


@dataclass(slots=True, eq=False)
class Unpack(Op):
    """`targets` are (component, path): `a, *b = source`."""

    targets: tuple[tuple[str, Path], ...]
    source: Path
    part: str = ""  # as of a Move


@dataclass(slots=True, eq=False)
class Next(Op):
    """A loop's head: on BODY edges `target` is one element of `source`, on EXHAUSTED edges there is none
    left."""

    target: Path
    source: Path
    counted: bool = False  # over `range(...)`: programs that count their leases count at least one
    part: str = ""  # `1:` where it goes over `source[1:]`
    turns: bool = False  # there is a first one: `range(world_size)`
    keys: bool = False  # of a dict

    @property
    def element(self) -> Path | None:
        """What `target` is; None where it counts the elements: `for i in range(len(source))`, and where it is
        a key."""
        if self.keys:
            return None
        by_number = self.counted and not self.source[0].startswith(ITERATED)
        return None if by_number else (*self.source, ANY_ITEM)


@dataclass(slots=True, eq=False)
class Call(Op):
    """`receiver` is the object of a method call; `callee` the path of the function where it is a path."""

    at: ast.Call
    target: Path
    callee: Path | None
    receiver: Path | None
    method: str
    args: tuple[tuple[Path, bool], ...]  # (operand, starred)
    kwargs: tuple[tuple[str | None, Path], ...]
    entered: bool = False  # it is the context expression of a `with`

    @property
    def is_told_where(self) -> bool:
        """`torch.add(a, b, out=work)`: its result is what it writes into."""
        return any(name == "out" for name, _ in self.kwargs)


@dataclass(slots=True, eq=False)
class Store(Op):
    """`target` (an attribute or item path) = source. `sliced` tells `a[i:j] = x`, which copies elements;
    `key` is the name that an item is put under."""

    target: Path
    source: Path
    sliced: bool = False
    part: str = ""  # as of a Move
    key: Path = ()


@dataclass(slots=True, eq=False)
class InPlace(Op):
    """`target op= operand`."""

    target: Path
    operand: Path


@dataclass(slots=True, eq=False)
class Delete(Op):
    target: Path


@dataclass(slots=True, eq=False)
class Capture(Op):
    """A nested function or lambda made here, with the names it takes from this scope."""

    target: Path
    function: ast.AST
    names: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Yield(Op):
    target: Path
    source: Path | None


@dataclass(slots=True, eq=False)
class Await(Op):
    target: Path
    source: Path


@dataclass(slots=True, eq=False)
class Enter(Op):
    target: Path
    context: Path


@dataclass(slots=True, eq=False)
class Exit(Op):
    """`__exit__` of `context` runs."""

    context: Path


@dataclass(slots=True, eq=False)
class Assume(Op):
    """This branch is taken because the condition `key` is `value`.

    `subject` is set for tests of one object: `kind` "truth", "none" (`subject is None`), "absent" (`subject
    < 0`, `subject == END` of an `other` that the module has), "granted" and "refused" (`subject.is_ok()`,
    `subject.failed()`), "typed" and "error"
    (`isinstance(subject, Slot)`, `isinstance(subject, Exception)`), "zero" (`subject == 0`), "some"
    (`subject > 0`) or "same" (`subject is other`) or one of `standing.ENDS`.
    `names` are the roots and `.attributes` that the condition reads.
    """

    key: str
    value: bool
    names: frozenset[str]
    subject: Path | None = None
    kind: str = "truth"
    other: Path | None = None

    @property
    def says_absent(self) -> bool:
        """Whether on this branch there is nothing in the subject."""
        if self.kind in ("same", "zero", "some") or self.kind in ENDS:
            return False
        if self.kind == "absent" and self.other is not None and not self.other[0].startswith("@"):
            return False  # `slot == LAST` of a parameter
        return (self.kind not in ("truth", "granted", "typed")) == self.value

    @property
    def asks_the_sort(self) -> bool:
        """It speaks of the subject itself, and of nothing that lies in its fields."""
        return self.kind in ("typed", "error")

    @property
    def says_over(self) -> bool:
        """Whether on this branch the subject, if it is the lease, is owed no more."""
        return ENDS.get(self.kind) is self.value


@dataclass(slots=True, eq=False)
class Define(Op):
    """`name` holds the truth of the condition `key` (negated where `value` is False)."""

    name: str
    key: str
    value: bool
    names: frozenset[str]


@dataclass(slots=True, eq=False)
class Havoc(Op):
    """Forget what is known of these conditions: they are asked again because they change elsewhere."""

    keys: frozenset[str]


@dataclass(slots=True, eq=False)
class EndStatement(Op):
    """Intermediate values of the statement die here."""


@dataclass(slots=True, eq=False)
class Leave(Op):
    """The function is left; for RETURN the value is in `RESULT`."""

    way: Way


def is_temporary(path: Path) -> bool:
    return path[0][0] == "%" and path[0] != "%return"
