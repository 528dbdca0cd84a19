"""Answers the analysis of misuse for the calls of one function: who gives back, writes fields, uses what it
is given."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

from auditor.flow.effects import Acquisition, Handle, Position, Treatment, Value
from auditor.flow.follow import EDGES
from auditor.flow.knowledge import NOTHING
from auditor.flow.lifetime import Life, Lifetime
from auditor.flow.limits import TooManyStates
from auditor.flow.misuse import Fault, Release
from auditor.flow.operands import operands
from auditor.flow.solve import solve
from auditor.ir.graph import TooLarge
from auditor.ir.ops import Call, Path, Store
from auditor.project.code.calls import is_bound, parameter_for
from auditor.project.code.modules import Function
from auditor.project.meaning import library
from auditor.project.meaning.effects import FunctionEffects
from auditor.project.meaning.recognise import Recogniser
from auditor.project.misuse.release_bodies import ReleaseBodies, only_sets_fields
from auditor.protocols.tensor_accesses import Access, access_of
from auditor.protocols.vocabulary import split

NOT_A_RELEASE = frozenset(
    {"pin", "unpin", "lock", "unlock", "ref", "refs", "unref", "deref", "decref", "refcount", "count", "dec",
     "decrement", "decrease"}
)  # fmt: skip
"""Words in the names of functions that take back one of several holds; `free_blocks` has none of them."""

ACCEPTING = frozenset({"put", "push", "append", "recycle", "return", "add"})
HARMLESS = library.BORROWING | frozenset(
    {"append", "remove", "discard", "index", "count", "extend", "insert", "pop", "add", "get", "ref",
     "finalize", "getrefcount", "getattr", "setattr", "is_tensor", "current_stream"}
)  # fmt: skip
KEEPING_ALIVE = frozenset({"append", "get", "close"})
REDUCING = frozenset({"sum", "min", "max", "abs", "any", "all"})
"""Builtins of numbers that torch has too."""

OF_A_DESCRIPTOR = frozenset(
    {"read", "write", "pread", "pwrite", "readv", "writev", "fsync", "fdatasync", "fchmod", "fchown", "fstat",
     "ftruncate", "lseek", "sendfile", "dup", "dup2", "isatty", "fdopen", "set_inheritable", "lockf",
     "fpathconf", "fstatvfs"}
)  # fmt: skip
"""Functions of `os` that are given an open descriptor first."""

ENTRY = 0
ASKING = ("is_", "has_", "get_", "__")
AFTERWARDS = ("unlink", "close", "wait", "join", "shutdown", "terminate", "cleanup")
"""What belongs to the end of a thing, and often follows its release."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What a function does to something it is given: given back on `all_ways` or on `some`; `kept` if its
    place still names it then; `used` after it had been released."""

    all_ways: bool = False
    some: bool = False
    kept: bool = True
    tolerant: bool = False
    checked: bool = True
    used: bool = False
    pool: Path | None = None


NOTHING_KNOWN = Ends()

OF_MANY_THINGS = frozenset({"abort", "detach", "quit"})
"""Methods that end a file or a link, and of what nobody knows may do anything: a tensor's `detach()`, the
`abort()` of a call that is being served."""


class Endings:
    """What functions do to what they are given, each asked once; recursion is answered with nothing."""

    def __init__(self, recogniser: Recogniser, effects: Callable[[Function], FunctionEffects]) -> None:
        self.recogniser = recogniser
        self.bodies = ReleaseBodies(recogniser.calls)
        self._effects = effects
        self._uses: dict[Function, FunctionUses] = {}
        self._ends: dict[tuple[Function, Path, Value, bool], Ends] = {}
        self._written: dict[Function, frozenset[str]] = {}

    def uses(self, function: Function) -> "FunctionUses":
        if function not in self._uses:
            self._uses[function] = FunctionUses(function, self._effects(function), self)
        return self._uses[function]

    def of(self, function: Function, place: Path, value: Value, released: bool = False) -> Ends:
        """`released`: it had been given back before the call."""
        key = (function, place, value, released)
        if key not in self._ends:
            self._ends[key] = NOTHING_KNOWN
            self._ends[key] = self._follow(function, place, value, released)
        return self._ends[key]

    def _follow(self, function: Function, place: Path, value: Value, released: bool) -> Ends:
        try:
            graph = function.graph
            domain = Lifetime(graph, self.uses(function), value, "", going_on=True)
            life = Life(frozenset({(place, False)}), released=ENTRY if released else -1)
            solve(graph, [(ENTRY, life, NOTHING)], domain.step, EDGES["explicit"])
        except (TooLarge, TooManyStates, RecursionError):
            return NOTHING_KNOWN
        ended = [left for left in domain.left if left.released >= 0]
        given = list(domain.releases.values())
        return Ends(
            all_ways=bool(ended) and len(ended) == len(domain.left) and not function.is_context_manager,
            some=bool(ended),
            kept=any((place, False) in left.aliases for left in ended),
            tolerant=any(release.tolerant for release in given),
            checked=all(release.checked for release in given),
            pool=_only({domain.spelt(release.pool) for release in given}),
            used=released and any(event.fault in (Fault.USED, Fault.TWICE) for event in domain.events),
        )

    def written(self, function: Function) -> frozenset[str]:
        """Attributes that the function, or what it calls in the project, assigns."""
        if function not in self._written:
            self._written[function] = frozenset()
            try:
                stored = {op.target[-1] for op in function.graph.ops if isinstance(op, Store)}
            except (TooLarge, RecursionError):
                stored = {"*"}
            for call in function.calls:
                for target in self.recogniser.calls.targets(function, call)[0]:
                    stored |= self.written(target)
            self._written[function] = frozenset(stored)
        return self._written[function]


def _is_first(target: Function, position: Position, bound: bool) -> bool:
    """What a function gives back is its first argument; the others say how."""
    own = target.parameters[1:] if target.is_method and not target.is_static else target.parameters
    return position == -1 or not own or parameter_for(target, position, bound) == own[0]


def _only(pools: set[Path | None]) -> Path | None:
    return pools.pop() if len(pools) == 1 else None


class FunctionUses:
    """`Uses` for one function; what leaks ask is passed on to its effects."""

    def __init__(self, function: Function, effects: FunctionEffects, endings: Endings) -> None:
        self.function = function
        self.effects = effects
        self.endings = endings
        self.recogniser = effects.recogniser

    def acquisition(self, call: Call) -> Acquisition | None:
        return self.effects.acquisition(call)

    def treatment(self, call: Call, position: Position, rest: Path, value: Value, protocol: str) -> Treatment:
        return self.effects.treatment(call, position, rest, value, protocol)

    def ends_itself(self, protocol: str) -> bool:
        return self.effects.ends_itself(protocol)

    def telling(self, protocol: str) -> frozenset[str]:
        return self.effects.telling(protocol)

    def lends_plain_memory(self, protocol: str) -> bool:
        return self.effects.lends_plain_memory(protocol)

    def end_alike(self, one: str, other: str) -> bool:
        return self.effects.end_alike(one, other)

    def is_ended_through(self, field: str, protocol: str) -> bool:
        return self.effects.is_ended_through(field, protocol)

    def is_named_to_an_end(self, field: str, protocol: str) -> bool:
        return self.effects.is_named_to_an_end(field, protocol)

    def ends_its_keys(self, field: str, protocol: str) -> bool:
        return self.effects.ends_its_keys(field, protocol)

    def is_own_end(self, method: str, protocol: str) -> bool:
        return self.effects.is_own_end(method, protocol)

    def put_on_a_stack(self, call: Call) -> Treatment | None:
        return self.effects.put_on_a_stack(call)

    def is_absorbed(self, added: ast.AST, protocol: str) -> bool:
        return self.effects.is_absorbed(added, protocol)

    def ends_what_was_asked(self, call: Call, begun: Call, protocol: str) -> bool:
        return self.effects.ends_what_was_asked(call, begun, protocol)

    def is_memory(self, table: ast.AST) -> bool:
        return self.effects.is_memory(table)

    def dies_with_its_object(self, place: Path) -> bool:
        return self.effects.dies_with_its_object(place)

    def forget(self) -> None:
        self.effects.forget()

    def owed_behind_its_with(self, context: ast.AST, inside: Path, value: Value, protocol: str) -> bool:
        return self.effects.owed_behind_its_with(context, inside, value, protocol)

    def only_releases(self, call: Call) -> bool:
        return self.effects.only_releases(call)

    def captured(self, function: object, name: str, rest: Path, value: Value, protocol: str) -> Treatment:
        return self.effects.captured(function, name, rest, value, protocol)

    def dotted(self, call: Call) -> str | None:
        return self.recogniser.calls.targets(self.function, call.at)[2]

    def module_class(self, call: Call) -> str | None:
        if not isinstance(call.at.func, (ast.Attribute, ast.Name)):
            return None
        held = self.recogniser.calls.model.type_of(self.function, call.at.func)
        return held.rpartition(".")[2] if isinstance(held, str) and ".nn." in held else None

    # Releases -----------------------------------------------------------------------------------------------

    def release(
        self, call: Call, position: Position, rest: Path, value: Value, protocol: str
    ) -> Release | None:
        if call.method in ("closing", "aclosing"):
            return None  # it closes when its `with` is left, not now
        if not protocol and position == -1 and call.method in OF_MANY_THINGS:
            return None
        if self.recogniser.releases(self.function, call.at, position):
            inner = any(piece.startswith(".") for piece in rest)  # what a field of it holds stays
            return None if inner else self._listed(call, position)
        targets, constructed, _ = self.recogniser.calls.targets(self.function, call.at)
        if len(targets) != 1 or constructed is not None or targets[0].is_abstract:
            return None
        name = parameter_for(targets[0], position, is_bound(targets[0], call.at))
        if name is None:
            return None
        ends = self.endings.of(targets[0], (name, *rest), value)
        if not ends.all_ways:
            return None
        pool = self._translated(call, targets[0], ends.pool)
        return Release(ends.tolerant, ends.checked, pool, ends.kept, here=False)

    def released_within(self, call: Call, place: Path, value: Value) -> Release | None:
        """A function made here gives back a name that it takes from this one."""
        targets = self.recogniser.calls.targets(self.function, call.at)[0]
        if len(targets) != 1 or targets[0].parent is not self.function or place[0].startswith(("@", "%")):
            return None
        ends = self.endings.of(targets[0], ("@" + place[0], *place[1:]), value)
        return Release(ends.tolerant, ends.checked, None, ends.kept, here=False) if ends.all_ways else None

    def _translated(self, call: Call, target: Function, pool: Path | None) -> Path | None:
        """The callee's pool in the caller's words."""
        if pool is None or pool[0].startswith("@"):
            return pool
        bound = is_bound(target, call.at)
        for position, path in operands(call):
            if parameter_for(target, position, bound) == pool[0]:
                return (*path, *pool[1:])
        return None

    def _listed(self, call: Call, position: Position) -> Release | None:
        """A call that a protocol lists; counting down one of several holds is none, except by settings."""
        if self.recogniser.declares(self.function, call.at, position):
            release = self._by_its_name(call, position)
            targets = self.recogniser.calls.targets(self.function, call.at)[0]
            only_sets = bool(targets) and all(only_sets_fields(target) for target in targets)
            return replace(release, tolerant=release.tolerant or only_sets)
        if not NOT_A_RELEASE.isdisjoint(split(call.method)):
            return None
        targets = self.recogniser.calls.targets(self.function, call.at)[0]
        for target in targets:
            half = self.recogniser.releasing.get(target)
            if half is not None and half[1].handle is not Handle.RESULT:
                return None
            first = half is None or half[1].argument == 0
            if first and not _is_first(target, position, is_bound(target, call.at)):
                return None
            body = self.endings.bodies.of(target)
            return Release(body.tolerant, body.checked, call.receiver)
        if isinstance(position, str) and call.args:
            return None  # `free(buf, pool=POOL)`: the keyword says how
        return self._by_its_name(call, position)

    def _by_its_name(self, call: Call, position: Position) -> Release:
        """Of a release without a body at hand. `thing.close()` may be said twice, `os.close(fd)` may not."""
        name = call.method.lower()
        accepting = any(word in name.split("_") for word in ACCEPTING)
        return Release(name == "close" and position == -1, not accepting, call.receiver)

    # Uses ---------------------------------------------------------------------------------------------------

    def may_write(self, call: Call, position: Position, rest: Path) -> bool:
        fields = {piece for piece in rest if piece.startswith(".")}
        targets, constructed, _ = self.recogniser.calls.targets(self.function, call.at)
        if constructed is not None:
            return False
        if targets:
            written = frozenset().union(*(self.endings.written(target) for target in targets))
            return bool(written & (fields | {"*"}))
        return call.method not in HARMLESS

    def uses(self, call: Call, position: Position, rest: Path, value: Value, protocol: str) -> bool:
        if value is Value.INDEX or self._harmless(call, position):
            return False
        targets, constructed, dotted = self.recogniser.calls.targets(self.function, call.at)
        if constructed is not None or (any(piece.startswith(".") for piece in rest) and not targets):
            return False
        if targets:
            return self._used_by_callee(call, targets, position, rest, value)
        if value is Value.TENSOR:
            return self._accessed(call, position, rest, dotted)
        if position == 0 and rest == ():
            return dotted is not None and dotted.startswith("os.") and call.method in OF_A_DESCRIPTOR
        return position == -1 and rest == () and not call.method.startswith(ASKING + AFTERWARDS)

    def _harmless(self, call: Call, position: Position) -> bool:
        """`len(work)` is, `work.sum()` is not, though both are names of builtins."""
        if position == -1 and call.receiver is not None:
            return call.method in KEEPING_ALIVE
        return call.method in (HARMLESS if call.receiver is None else HARMLESS - REDUCING)

    def _used_by_callee(
        self, call: Call, targets: tuple[Function, ...], position: Position, rest: Path, value: Value
    ) -> bool:
        if len(targets) != 1:
            return False
        name = parameter_for(targets[0], position, is_bound(targets[0], call.at))
        return name is not None and self.endings.of(targets[0], (name, *rest), value, True).used

    def _accessed(self, call: Call, position: Position, rest: Path, dotted: str | None) -> bool:
        """An operation of torch that is known to look at values, or to write them."""
        known = dotted is not None and dotted.split(".")[0] == "torch"
        access = access_of(call.method)
        if rest:
            return known and rest[0].startswith("[") and access is Access.READ
        if position == "out":
            return True
        return access is not None and access is not Access.NEUTRAL
