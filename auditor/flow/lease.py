"""What the analysis decided about one acquire: where it began, how it ended, what was lost on the way."""

from dataclasses import dataclass
from enum import StrEnum

from auditor.flow.effects import Value
from auditor.model import Span, Step


class Loss(StrEnum):
    """How a lease stopped being held without being released or handed over."""

    RETURN = "return"
    FALL_THROUGH = "end of function"
    NEXT_TURN = "next turn of the loop"  # the acquire runs again while its last lease is still held
    RAISE = "raise"  # raise or assert in this function
    CALL = "call"  # a call that may raise
    CANCEL = "cancellation"  # CancelledError at an await
    CLOSE = "generator close"  # GeneratorExit at a yield
    DISCARDED = "discarded"  # nobody ever named the result
    REBOUND = "rebound"
    DELETED = "deleted"
    OVERWRITTEN = "overwritten"  # a field that held it got another lease
    DROPPED = "dropped"  # the container's entries were thrown away


EXCEPTIONAL = frozenset({Loss.RAISE, Loss.CALL, Loss.CANCEL, Loss.CLOSE})


@dataclass(frozen=True, slots=True)
class Leak:
    """One path on which the lease is lost. `trace` runs from the acquire to `at`.

    `failed` names the other acquire whose failing branch this path takes, if any; `started` is whether a task
    is started on it; `parted` whether it is of a list of which other leases are given back or kept there.
    """

    loss: Loss
    at: Span
    holder: str
    trace: tuple[Step, ...]
    failed: str | None = None
    started: bool = False
    parted: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """Where on an object a lease was stored: `owner` is the class's qualified name, `path` such as `buf` or
    `leases[*]`, `root` what the function that stores it there calls the object; nothing, and the module's
    name, of what a module has."""

    owner: str
    path: str
    root: str = "self"

    @property
    def written(self) -> str:
        """As the function writes it: `self.leases[*]`."""
        return f"{self.root}.{self.path}" if self.root else self.path


@dataclass(frozen=True, slots=True)
class GivingBack:
    """How the function that acquired a lease would give it back.

    `call` has `{}` in the lease's place. `lending` is the callee that takes the acquire's arguments and lends
    for a `with` block, if the pool has one. `certain` is whether the project's own code says so. With `each`
    the acquire returned a list of leases, and the call is about one of them; with `itself` it was called of
    the lease, as a count is taken of an object.
    """

    call: str
    lending: str | None = None
    certain: bool = True
    each: bool = False
    itself: bool = False


@dataclass(frozen=True, slots=True)
class Lease:
    """One recognised acquire call in one function.

    `released` and `handed_over` say whether some path ends so, `releases` where; `fields` lists where it was
    stored; `giving_back` is how a fix would release it. `unasked` is the method that would end it where
    nothing in the project calls that. `told_elsewhere` are leaks of what came out of a container: they are
    told of the acquire that put it there.
    """

    span: Span
    symbol: str
    text: str
    protocol: str
    holder: str
    leaks: tuple[Leak, ...] = ()
    released: bool = False
    handed_over: bool = False
    in_context_manager: bool = False
    fields: tuple["StoredField", ...] = ()
    callers: "Callers | None" = None
    releases: tuple[Span, ...] = ()
    giving_back: GivingBack | None = None
    value: Value = Value.OBJECT
    unasked: str = ""
    told_elsewhere: tuple[Leak, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredField:
    """A field that holds the lease when the function is left, and what the rest of the project does with
    it."""

    field: Field
    at: Span
    released_by: tuple[str, ...] = ()  # methods and functions that release it
    partly_by: tuple[
        str, ...
    ] = ()  # exit methods that release it only without an exception, or only with one
    cleanups: tuple[str, ...] = ()  # cleanup methods the class has, releasing or not
    drops: tuple[Leak, ...] = ()  # places that throw entries away unreleased
    overwrite: Leak | None = None  # stored again while one may be held
    escapes: bool = False  # somebody else is handed the field, so its end cannot be judged


@dataclass(frozen=True, slots=True)
class Callers:
    """Who receives a lease that a public function returns: calls in the tree, and those that lose it."""

    known: int
    losing: tuple[Step, ...]
