"""Why a call acquires, and what."""

from __future__ import annotations

from dataclasses import dataclass

from auditor.flow.effects import Handle, Position, Value
from auditor.ir.ops import Path


@dataclass(frozen=True, slots=True)
class Source:
    """Why a call acquires. `rest` is where in the result the lease lies, and `too` are other fields
    of it that are the lease as well.

    `flags` are items of a returned tuple that are constant where the lease is returned: `return buf, True`.
    `own` is what holds of the object's fields there, without its name: `.pool` is true after `if self.pool:`.
    `unless` are parameters that are None there: who brings his own buffer gets that one back. `asked` are
    parameters that are true or false there: `load(file, opened=True)` opens nothing; `given` is what that
    says of the arguments of this call. `recorded`: a table of the object has it too. `fresh`: the object
    around it was made for the caller. `opened`: it holds something open. `from_zero`: the number may be 0.
    `also` are further leases in it. `into`: the parameter of whose argument `rest` is a place, not of the
    result. `second_hand`: others have put it into the queue that it came out of. `proposed`: its
    pair is. `by_key`: what is told stands for it as well as the result, `told` by the name of a parameter of
    a function that returns it. `helped`: a function of the tree takes it and leaves it held, and answers what
    it likes.
    """

    protocol: str
    origin: str
    handle: Handle
    value: Value
    argument: Position = 0
    rest: Path = ()
    lease: bool = False
    flags: frozenset[tuple[str, bool]] = frozenset()
    inner: bool = False
    counts: bool = False
    own: frozenset[tuple[str, bool]] = frozenset()
    unless: frozenset[str] = frozenset()
    asked: frozenset[tuple[str, bool]] = frozenset()
    given: frozenset[tuple[str, bool]] = frozenset()
    recorded: bool = False
    fresh: bool = False
    opened: bool = False
    from_zero: bool = False
    into: str = ""
    second_hand: bool = False
    proposed: bool = False
    helped: bool = False
    by_key: bool = False
    told: str = ""
    also: tuple[Source, ...] = ()
    too: tuple[Path, ...] = ()
