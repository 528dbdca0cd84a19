"""Which calls acquire and lend: settings, then pairs of the tree, then the built-in tables."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from auditor.flow.effects import Acquisition, Handle, Position, Value
from auditor.ir.ops import Call, Make, Move, Path, is_temporary
from auditor.project.calls import Calls
from auditor.project.discovery import Half, Pair
from auditor.project.modules import Function
from auditor.project.releases import Releases, callee_text, names_of
from auditor.project.summaries import PROCESS
from auditor.protocols.protocol import Protocol
from auditor.protocols.vocabulary import COUNTS, WEAK, split

GUARD = re.compile(r"(?:lock|mutex|sem|semaphore|cond|condition|gate)_?\.\w+$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Source:
    """Why a call acquires. `rest` is where in the result the lease lies.

    `flags` are items of a returned tuple that are constant where the lease is returned: `return buf, True`.
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


class Recogniser(Releases):
    """Answers by resolved function where there is one; a name alone is only believed where nothing else is
    known."""

    def __init__(self, calls: Calls, protocols: Sequence[Protocol], pairs: Sequence[Pair]) -> None:
        super().__init__(calls, protocols, pairs)
        self.acquiring: dict[Function, tuple[Pair, Half]] = {}
        self.wrappers: dict[Function, Source] = {}
        self._names: dict[str, list[tuple[Pair, Half]]] = {}
        for pair in pairs:
            self._add(pair)

    def _add(self, pair: Pair) -> None:
        for half in pair.acquires:
            self.acquiring.setdefault(half.function, (pair, half))
            self._names.setdefault(half.function.name, []).append((pair, half))

    @property
    def words(self) -> set[str]:
        """Last names of calls that may acquire."""
        found = set(self._names) | {function.name for function in self.wrappers}
        for protocol in (*self.declared, *self.built_in):
            found |= {
                pattern.text.partition("(")[0].rpartition(".")[2]
                for pattern in (*protocol.acquire, *protocol.lease)
            }
        return found

    # Acquiring ----------------------------------------------------------------------------------------------

    def source(self, function: Function, call: ast.Call) -> Source | None:
        meant = self.aliases.meant(function, call)
        if meant is not None and (found := self._source(*meant)) is not None:
            return found if found.handle is Handle.RESULT else None
        return self._source(function, call)

    def _source(self, function: Function, call: ast.Call) -> Source | None:
        targets, constructed, dotted = self.calls.targets(function, call)
        text = callee_text(call)
        declared = self._by_pattern(self.declared, names_of(targets, constructed, dotted), text)
        if declared is not None:
            return declared
        for target in targets:
            found = self._of_function(target)
            if found is not None:
                inner = target.name.startswith("_") and target.cls is not None and target.cls is function.cls
                return replace(
                    found, inner=inner and found.origin == "discovered" and target in self.acquiring
                )
        if (targets and not all(target.is_abstract for target in targets)) or constructed is not None:
            return None
        if not targets and dotted is None:
            found = self._by_name(call)
            if found is not None:
                return found
        return self._by_pattern(self.built_in, names_of(targets, None, dotted), text)

    def _of_function(self, target: Function) -> Source | None:
        if target in self.acquiring:
            pair, half = self.acquiring[target]
            return _discovered(pair, half)
        return self.wrappers.get(target)

    def _by_pattern(self, protocols: Sequence[Protocol], names: tuple[str, ...], text: str) -> Source | None:
        guard = GUARD.search(text) is not None
        for protocol in protocols:
            if guard and protocol.origin == "built-in" and protocol.handle is Handle.RESULT:
                continue  # `pool.lock.acquire()` takes the lock
            for patterns, lease in ((protocol.lease, True), (protocol.acquire, False)):
                for pattern in patterns:
                    if pattern.name.fullmatch(text) or any(pattern.name.fullmatch(name) for name in names):
                        return Source(
                            protocol.name,
                            protocol.origin,
                            protocol.handle,
                            protocol.value,
                            protocol.argument,
                            (),
                            lease,
                        )
        return None

    def _by_name(self, call: ast.Call) -> Source | None:
        found = self.called_like(call)
        if found is None:
            return None
        return _discovered(*found)

    def called_like(self, call: ast.Call) -> tuple[Pair, Half] | None:
        """An unknown receiver is believed where it is called like the pool."""
        if not isinstance(call.func, ast.Attribute):
            return None
        for pair, half in self._names.get(call.func.attr, ()):
            distinct = half.name.verb not in WEAK or len(split(half.function.name)) > 1
            if distinct and _called_like(call.func.value, pair):
                return pair, half
        return None

    def acquisition(self, function: Function, call: Call) -> Acquisition | None:
        source = self.source(function, call.at)
        if source is None:
            return None
        places = self._places(function, source, call)
        return Acquisition(
            source.protocol,
            source.handle,
            source.value,
            places,
            callee_text(call.at),
            managed=source.lease or call.entered,
            declared=source.origin != "discovered",
            flags=source.flags,
            inner=source.inner,
            counts=source.counts,
            own_key=all(place[0] in function.graph.fresh_roots for place in places),
        )

    def _places(self, function: Function, source: Source, call: Call) -> tuple[Path, ...]:
        if source.handle is Handle.RESULT:
            return (call.target + source.rest,)
        if source.handle is Handle.RECEIVER:
            return (call.receiver,) if call.receiver is not None else (PROCESS,)
        if source.handle is Handle.NONE:
            return (PROCESS,)
        if isinstance(source.argument, int) and source.argument < len(call.args):
            return self._filled(function, call.args[source.argument][0])
        for name, path in call.kwargs:
            if name == source.argument or (call.args == () and source.argument == 0):
                return (path,)
        return (PROCESS,)

    def _filled(self, function: Function, path: Path) -> tuple[Path, ...]:
        """`alloc([request])` fills the elements of the list it is given."""
        if not is_temporary(path):
            return _aliases(function, path)
        for op in function.graph.ops:
            if isinstance(op, Make) and op.target == path and op.items:
                return tuple(element for _, element in op.items)
        return (path,)


def _discovered(pair: Pair, half: Half) -> Source:
    counts = half.name.verb in COUNTS
    return Source(pair.name, "discovered", half.handle, half.value, half.argument, counts=counts)


def _aliases(function: Function, path: Path) -> tuple[Path, ...]:
    """Other names that the function gives to the same object."""
    same = {path}
    for op in function.graph.ops:
        if isinstance(op, Move) and not is_temporary(op.target) and not is_temporary(op.source):
            if op.source in same and len(op.target) == 1:
                same.add(op.target)
            elif op.target in same and len(op.source) == 1:
                same.add(op.source)
    return (path, *sorted(same - {path}))


def _called_like(receiver: ast.expr, pair: Pair) -> bool:
    """`self.kv_allocator.alloc` is called like a class KVAllocator."""
    name = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
    words = set(split(name)) - {"self", "get"}
    mine = set(split(pair.name)) - {"base", "abstract", "interface", "kv", "cache", "memory", "new", "the"}
    return bool(words & mine)
