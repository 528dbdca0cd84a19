"""What can be wrong with a lease besides its never coming back, and what the project is asked for it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from auditor.flow.effects import Effects, Position, Value
from auditor.ir.ops import Call, Path
from auditor.model import Span, Step


class Fault(StrEnum):
    """The kinds of misuse; one rule speaks of each."""

    TWICE = "released twice"
    USED = "used after its release"
    FOREIGN = "released though it was never acquired"
    ESCAPED = "a view outlives the lease"
    GRAPH = "released while autograd may need it"
    UNWRITTEN = "read before it is written"
    OTHER_POOL = "released to another pool"
    IN_FLIGHT = "released while something else may use it"


@dataclass(frozen=True, slots=True)
class Misuse:
    """One fault, at the place where it happens. `lease` names what it happens to, `why` what makes it one."""

    fault: Fault
    span: Span
    symbol: str
    lease: str
    why: str
    trace: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """A call that surely gives back one of its operands.

    `tolerant`: a second release of the same does nothing. `checked`: the pool would notice what is not its
    own. `pool` is where it goes. `kept`: the operand's place still names it afterwards, so that it can be
    mistaken for a lease. `here`: not in a function that is called."""

    tolerant: bool = False
    checked: bool = True
    pool: Path | None = None
    kept: bool = True
    here: bool = True


class Uses(Effects, Protocol):
    """What misuse asks besides what leaks ask."""

    def release(
        self, call: Call, position: Position, rest: Path, value: Value, protocol: str
    ) -> Release | None:
        """Whether the call gives back what lies at `rest` in the operand, on every ordinary way."""

    def released_within(self, call: Call, place: Path, value: Value) -> Release | None:
        """Whether the call runs a function made here that gives back what this function has at `place`."""

    def may_write(self, call: Call, position: Position, rest: Path) -> bool:
        """Whether the call may put something else where `rest` leads from the operand."""

    def uses(self, call: Call, position: Position, rest: Path, value: Value, protocol: str) -> bool:
        """Whether the call surely reads or writes what it is given."""

    def dotted(self, call: Call) -> str | None:
        """The callee's dotted name outside the project, where it is known."""

    def module_class(self, call: Call) -> str | None:
        """The class of the torch module that is called, where it is known."""
