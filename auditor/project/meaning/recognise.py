"""Which calls acquire and lend: settings, then pairs of the tree, then the built-in tables."""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from auditor.flow.effects import Acquisition, Handle, Value
from auditor.flow.lease import Lease
from auditor.flow.spelled import spelled
from auditor.ir.ops import Call, Path, is_temporary
from auditor.project.code.asked_of import likeness
from auditor.project.code.bindings import told_anything
from auditor.project.code.calls import COMMON_NAMES, Calls, accepts
from auditor.project.code.deciding import decided_otherwise, told_of_arguments
from auditor.project.code.modules import Class, Function
from auditor.project.meaning.borrowers import Called
from auditor.project.meaning.contexts import entered_by_hand, says_when_entered
from auditor.project.meaning.filling import (
    given_as,
    is_made_for_it,
    is_owed_here,
    lent_in_turns,
    places_in_argument,
    told_of,
)
from auditor.project.meaning.one_more import is_one_more, is_one_more_of_itself
from auditor.project.meaning.opener import Opener
from auditor.project.meaning.parting import in_result
from auditor.project.meaning.releases import Releases, callee_text, names_of
from auditor.project.meaning.several_taken import each_taken, hands_out_a_list, in_a_list
from auditor.project.meaning.source import Source
from auditor.project.meaning.summaries import PROCESS
from auditor.project.meaning.used_as_tensor import used_as_tensor
from auditor.project.meaning.written_raises import WrittenRaises
from auditor.project.pools.bodies import fronts_a_pool, returns_itself, returns_something
from auditor.project.pools.called_like import (
    OF_CONTAINERS,
    asked_for_both,
    called_like_pool,
    given_back_near,
    name_of,
    names_an_amount,
    says_enough,
    written_for,
)
from auditor.project.pools.echoes import echoed
from auditor.project.pools.halves import Half, Pair
from auditor.project.pools.lent_or_keyed import LentOrKeyed
from auditor.project.pools.none_beside import known_beside, zero_is_none
from auditor.project.pools.plain_memory import lends_plain_memory
from auditor.project.pools.renewing import renewing
from auditor.project.pools.telling_fields import scalar_fields, telling_fields
from auditor.project.shapes.from_zero import hands_out_zero, hands_out_zero_of_module
from auditor.project.shapes.reference_counts import counts_what_it_returns
from auditor.protocols.protocol import Protocol
from auditor.protocols.result_parts import part_of_result, same_as
from auditor.protocols.vocabulary import COUNTS, WEAK, split

EMPTYING = re.compile(
    r"_*(?:close|clear|empty|drain|purge|trim|shutdown|dispose|destroy|reset|terminate)(?:_\w+)?"
)
"""Methods by which a pool gets rid of what it has."""

GUARD = re.compile(r"(?:(?:lock|mutex|sem|semaphore|cond|condition|gate)_?|smem\w*)\.\w+$", re.IGNORECASE)


class Recogniser(Releases):
    """Answers by resolved function where there is one; a name alone is only believed where nothing else is
    known."""

    def __init__(self, calls: Calls, protocols: Sequence[Protocol], pairs: Sequence[Pair]) -> None:
        super().__init__(calls, protocols, pairs)
        self.written_raises = WrittenRaises(calls)
        self.acquiring: dict[Function, tuple[Pair, Half]] = {}
        self.wrappers: dict[Function, Source] = {}
        self.openers: Mapping[Class, Opener] = {}
        self.contexts: Set[Function] = frozenset()  # context managers that lend
        self.borrowers: Set[Called] = frozenset()  # who is known to have only borrowed
        self.second_hand: dict[ast.Call, Source] = {}  # what takes leases out of queues
        self._names: dict[str, list[tuple[Pair, Half]]] = {}
        self._lent_or_keyed = LentOrKeyed(calls)
        self._lent: set[Function] = set()
        self._told_of: dict[tuple[str, bool], frozenset[str]] = {}
        self._plain: dict[str, bool] = {}
        self._counting: dict[str, bool] = {}
        self._numbering: set[Function] = set()
        self._renewing: dict[str, frozenset[Function]] = {}
        self._matched: dict[tuple[bool, tuple[str, ...], str], tuple[Protocol, bool] | None] = {}
        for pair in sorted(pairs, key=lambda pair: pair.proposed):  # what is sure comes first
            self._add(pair)

    def _add(self, pair: Pair) -> None:
        for half in pair.acquires:
            self.acquiring.setdefault(half.function, (pair, half))
            self._names.setdefault(half.function.name, []).append((pair, half))
            cls = half.function.cls
            if (
                hands_out_zero(self.calls.model.lineage(cls), half.function)
                if cls is not None
                else hands_out_zero_of_module(half.function)
            ):
                self._numbering.add(half.function)
            for end in self._lent_or_keyed.endings(pair, half):
                self._lent.add(half.function)
                self.releasing.setdefault(end, (pair, Half(end, half.name, Handle.RECEIVER)))

    def forget(self, protocols: Set[str]) -> None:
        """Pairs that are none, and whoever hands on what they lend."""
        for function in [each for each, (pair, _) in self.acquiring.items() if pair.name in protocols]:
            del self.acquiring[function]
        for name, known in self._names.items():
            self._names[name] = [each for each in known if each[0].name not in protocols]
        self.forget_ends(protocols)
        for function in [each for each, source in self.wrappers.items() if source.protocol in protocols]:
            del self.wrappers[function]

    @property
    def pools(self) -> set[Class]:
        """The classes that lend."""
        return {half.cls for half in self.acquiring if half.cls is not None}

    def lending(self, leases: Iterable[Lease]) -> set[Class]:
        """Those of them that somebody takes these from."""
        used = {lease.protocol for lease in leases}
        return {half.cls for half, (pair, _) in self.acquiring.items() if pair.name in used and half.cls}

    def renewing(self, protocol: str) -> frozenset[Function]:
        """What takes back all that a pool has lent at once."""
        if protocol not in self._renewing:
            halves = (half for pair, half in self.acquiring.values() if pair.name == protocol)
            takers = [half.function for half in halves if half.function.cls is not None]
            self._renewing[protocol] = renewing(takers)
        return self._renewing[protocol]

    @property
    def words(self) -> set[str]:
        """Last names of calls that may acquire."""
        made = {half.cls.name for half in self.acquiring if half.name == "__init__" and half.cls is not None}
        found = set(self._names) | made | {function.name for function in self.wrappers}
        for protocol in (*self.declared, *self.built_in):
            found |= {
                pattern.text.partition("(")[0].rpartition(".")[2]
                for pattern in (*protocol.acquire, *protocol.lease)
            }
        return found

    @property
    def unforeseen(self) -> set[str]:
        """Names by which no file is known to matter: of pools told by shape, of functions, `SLOTS.take()`."""
        halves = [half for _, half in self.acquiring.values()]
        unsaid = (each for each in halves if each.by_shape or not each.function.cls or each.name.verb in WEAK)
        return {half.function.name for half in unsaid} - COMMON_NAMES

    @property
    def common_names(self) -> Mapping[str, Set[str]]:
        """By pools' classes, what is asked of them by names that say nothing: `get` of a `StagingShelf`."""
        found: dict[str, set[str]] = {}
        for _, half in self.acquiring.values():
            if half.function.cls is not None and half.function.name in COMMON_NAMES - {"__init__"}:
                found.setdefault(half.function.cls.name, set()).add(half.function.name)
        return found

    def add_openers(self, openers: Mapping[Class, Opener]) -> None:
        """Objects that hold something open are acquired by whoever makes them, from now on."""
        self.openers = openers
        self._told_of.clear()
        self.ending_themselves.update(opener.cls.name for opener in openers.values())
        for opener in openers.values():
            for method in opener.closing:
                self.closing.setdefault(method, set()).add(opener.cls.name)

    # Acquiring ----------------------------------------------------------------------------------------------

    def source(self, function: Function, call: ast.Call) -> Source | None:
        if call in self.second_hand:
            return self.second_hand[call]
        meant = self.aliases.meant(function, call)
        if meant is not None and (found := self._source(*meant)) is not None:
            return found if found.handle is Handle.RESULT else None
        return self._source(function, call)

    def _source(self, function: Function, call: ast.Call) -> Source | None:
        targets, constructed, dotted = self.calls.targets(function, call)
        text = callee_text(call)
        declared = self._by_pattern(self.declared, names_of(targets, constructed, dotted), text, call)
        if declared is not None:
            return declared
        outside = not targets or self.calls.guessed(function, call)
        if text == f"super().{function.name}" and outside:
            return None  # a base elsewhere does it, and whoever calls this method owes what comes of it
        for target in () if self._one_guess_of_several(function, call, targets) else targets:
            if target.name == "__init__" and constructed is None:
                continue  # `super().__init__(budget)`: the object is made by whoever calls its class
            alone = self._shape_alone(function, call, target)
            found = None if alone else self._of_function(function, target, call)
            if found is not None and (found.into or found.helped):
                sure = len(targets) == 1 and not self.calls.guessed(function, call)
                made = sure and bool(found.into) and is_made_for_it(self.calls, function, target, call, found)
                if not sure or not (found.helped or made or is_owed_here(function, target, call, found)):
                    continue
                found = replace(found, fresh=found.fresh or made)
            ways = [] if found is None else [replace(found, also=()), *found.also]
            ways = [
                way for way in ways if not decided_otherwise(function, target, call, way.unless, way.asked)
            ]
            if found is not None and ways:
                inner = found.origin == "discovered" and self._is_inner(function, target)
                first, *more = (
                    replace(way, inner=inner, given=told_of_arguments(target, call, way.asked))
                    for way in ways
                )
                return replace(first, also=tuple(more))
        if constructed is not None:
            return self._opened(function, call, constructed)
        handle = entered_by_hand(self.calls, self.contexts, function, call) if self.contexts else None
        if handle is not None:
            says = says_when_entered(self.calls, self.contexts, function, call)
            return Source("contexts", "discovered", handle, Value.OBJECT, flags=says, opened=True)
        for target in targets:
            if (found := self._opened(function, call, target.cls, by=target)) is not None:
                return found
        if targets and not all(target.is_abstract for target in targets):
            return None
        if not targets and dotted is None and (like := self.called_like(call, function)) is not None:
            return _discovered(*like)
        if not targets and dotted is None and (like := self._given_back_in_kind(function, call)) is not None:
            return _discovered(*like)
        return self._by_pattern(self.built_in, names_of(targets, None, dotted), text, call)

    def _opened(
        self, function: Function, call: ast.Call, cls: Class | None, by: Function | None = None
    ) -> Source | None:
        """`Client(address)`, which connects at once; `client.ask(question)`, `by` which it connects."""
        for each in self.calls.model.lineage(cls) if cls is not None and self.openers else ():
            if each in self.openers and self.openers[each].is_opened(function, call, by):
                handle = Handle.RESULT if by is None else Handle.RECEIVER
                says_so = by is not None and not returns_something(by)
                flags = frozenset({("", True)}) if says_so else frozenset[tuple[str, bool]]()
                flags |= self.openers[each].says() if by is None else frozenset()
                return Source(each.name, "discovered", handle, Value.OBJECT, flags=flags, opened=True)
        return lent_in_turns(self.calls.model.lineage(cls), self.wrappers) if cls and by is None else None

    def _one_guess_of_several(self, function: Function, call: ast.Call, targets: Sequence[Function]) -> bool:
        """`holder.connect()` of an unknown holder, where one class's `connect` hands out what it opened and
        another's keeps it."""
        lending = sum(target in self.wrappers for target in targets)
        known = any(target in self.acquiring for target in targets)
        return 0 < lending < len(targets) and not known and self.calls.guessed(function, call)

    def _shape_alone(self, function: Function, call: ast.Call, target: Function) -> bool:
        """`deck.draw()` of who knows what: the name is no pool's, the receiver is not called like it, and
        nothing is given back to that receiver here, or by another method of the object whose field it is; nor
        are both halves called so where the pool is written that nothing else can be meant."""
        pair, half = self.acquiring.get(target, (None, None))
        if pair is None or half is None or not half.by_shape or not isinstance(call.func, ast.Attribute):
            return False
        if not self.calls.guessed(function, call) or says_enough(call.func.value, target, pair):
            return False
        return not (given_back_near(function, call.func.value, pair) or written_for(function, target, pair))

    def _is_inner(self, function: Function, target: Function) -> bool:
        """A class that asks its own private helper keeps its own books; not where another pool lends. So does
        a pool that hands out several at once, or empties itself."""
        own = target.cls is not None and target.cls is function.cls and target in self.acquiring
        if not own or fronts_a_pool(target):
            return False
        return target.name.startswith("_") or EMPTYING.fullmatch(function.name) is not None

    def _of_function(self, function: Function, target: Function, call: ast.Call) -> Source | None:
        if target in self.acquiring:
            pair, half = self.acquiring[target]
            found = _discovered(pair, half)
            if half.echo:
                found = replace(found, handle=echoed(found.handle, function, call, pair))
            elif target in self._lent and not self._lent_or_keyed.gives_back_keys(function.module, pair):
                return replace(found, handle=Handle.RESULT)
            unnamed = found.handle is Handle.ARGUMENT and not told_anything(call)
            if found.value is Value.AMOUNT and unnamed:
                return replace(found, handle=Handle.RECEIVER)  # `take_credit()` is one of them
            if found.handle is not Handle.RESULT:
                return found
            return each_taken(target, in_a_list(target, (end.function for end in pair.releases), found))
        return self.wrappers.get(target)

    def _by_pattern(
        self, protocols: Sequence[Protocol], names: tuple[str, ...], text: str, call: ast.Call
    ) -> Source | None:
        asked = (protocols is self.declared, names, text)  # the same calls are asked about again and again
        if asked not in self._matched:
            self._matched[asked] = _first_match(protocols, names, text)
        if (found := self._matched[asked]) is None:
            return None
        protocol, lease = found
        part = part_of_result(names, text, len(call.args))
        return Source(
            protocol.name,
            protocol.origin,
            protocol.handle,
            protocol.value,
            protocol.argument,
            part,
            lease,
            too=same_as(part),
        )

    def called_like(self, call: ast.Call, function: Function | None = None) -> tuple[Pair, Half] | None:
        """An unknown receiver is believed where it is called like the pool; of names that every container
        has, where what goes by its name in the file of the function is asked for both halves."""
        if not isinstance(call.func, ast.Attribute):
            return None
        receiver = call.func.value
        fitting = [
            (pair, half)
            for pair, half in self._names.get(call.func.attr, ())
            if called_like_pool(receiver, pair) and accepts(half.function, call)
        ]
        name = name_of(receiver)
        fitting.sort(key=lambda found: (-likeness(name, found[0].name), found[1].handle is not Handle.RESULT))
        for pair, half in fitting:
            distinct = half.name.verb not in WEAK or len(split(half.function.name)) > 1
            if distinct:
                return pair, half
            common = half.function.name in OF_CONTAINERS
            if common and function is not None and asked_for_both(function.module, receiver, pair):
                return pair, half
        return None

    def _given_back_in_kind(self, function: Function, call: ast.Call) -> tuple[Pair, Half] | None:
        """`gate.acquire(weight)`, where the file asks something so called for `gate.release(weight)` as well:
        no lock is told anything in both, and one class of the tree is."""
        if not isinstance(call.func, ast.Attribute) or not names_an_amount(call):
            return None
        told = [
            (pair, half)
            for pair, half in self._names.get(call.func.attr, ())
            if half.value is Value.AMOUNT and half.handle is Handle.ARGUMENT and accepts(half.function, call)
        ]
        known = len(told) == 1 and asked_for_both(
            function.module, call.func.value, told[0][0], names_an_amount
        )
        return told[0] if known else None

    def acquisition(self, function: Function, call: Call, source: Source | None = None) -> Acquisition | None:
        source = source or self.source(function, call.at)
        if source is None:
            return None
        again = source.counts and source.handle is Handle.ARGUMENT and self._says_it_again(function, call)
        if again and not source.by_key and is_one_more(function, call.at, self.ending_names(source.protocol)):
            source = replace(source, handle=Handle.RESULT, rest=())
        if self._returns_one_more(function, call, source):
            source = replace(source, handle=Handle.RESULT, rest=())
        if source.value is Value.OBJECT and self._is_tensor(function, source, call):
            source = replace(source, value=Value.TENSOR)
        places = self._places(function, source, call)
        if not places:
            return None  # `fill(*told)`: nobody can tell which object it will lie in
        return Acquisition(
            source.protocol,
            source.handle,
            source.value,
            places,
            callee_text(call.at),
            managed=source.lease or call.entered,
            declared=source.origin != "discovered",
            foreign=source.origin == "built-in",
            flags=source.flags,
            inner=source.inner,
            counts=source.counts,
            own=source.own,
            given=source.given,
            recorded=source.recorded,
            fresh=source.fresh,
            opened=source.opened,
            telling=self.telling(source.protocol),
            plain=source.handle is Handle.RESULT and self.lends_plain_memory(source.protocol),
            shared=_is_itself(source) and self._counts_users(source.protocol),
            from_zero=source.from_zero or self._from_zero(function, call.at),
            zero_is_none=source.handle is Handle.RESULT and self._says_none_by_zero(function, call.at),
            helped=source.helped,
            several=source.value is Value.INDEX and self._in_a_list(function, call.at),
            own_key=source.opened or _made_here(function, source, places),
        )

    def _is_tensor(self, function: Function, source: Source, call: Call) -> bool:
        """By what is done with it here, where a pool of the tree has not said what it lends."""
        plain = source.handle is Handle.RESULT and source.origin == "discovered"
        whole = plain and not (source.rest or source.too or source.into)
        return whole and used_as_tensor(function, call.at)

    def telling(self, protocol: str, *, memory: bool = True) -> frozenset[str]:
        """Of a pool of the tree, the fields of what it lends that lead nobody back to it."""
        key = protocol, memory
        if key not in self._told_of:
            pairs = [pair for pair, _ in self.acquiring.values() if pair.name == protocol]
            model = self.calls.model
            told = telling_fields(model, pairs[0], memory=memory) if pairs else frozenset[str]()
            told = told.union(*(scalar_fields(model, cls) for cls in self.openers if cls.name == protocol))
            self._told_of[key] = told
        return self._told_of[key]

    def lends_plain_memory(self, protocol: str) -> bool:
        """Whether all that a pool of the tree lends is a row of numbers."""
        if protocol not in self._plain:
            lend = [half for pair, half in self.acquiring.values() if pair.name == protocol]
            plain = bool(lend) and all(half.handle is Handle.RESULT for half in lend)
            self._plain[protocol] = plain and all(lends_plain_memory(half.function) for half in lend)
        return self._plain[protocol]

    def _counts_users(self, protocol: str) -> bool:
        """Whether a pool of the tree raises a count of what it returns: the same for everybody who asks."""
        if protocol not in self._counting:
            self._counting[protocol] = any(
                half.name.verb in COUNTS
                or counts_what_it_returns(half.function, [end.function for end in pair.releases])
                for pair, half in self.acquiring.values()
                if pair.name == protocol
            )
        return self._counting[protocol]

    def _from_zero(self, function: Function, call: ast.Call) -> bool:
        reached = {each for each in self.calls.targets(function, call)[0] if not each.is_abstract}
        return bool(reached) and reached <= self._numbering

    def _says_none_by_zero(self, function: Function, call: ast.Call) -> bool:
        reached = [each for each in self.calls.targets(function, call)[0] if not each.is_abstract]
        return bool(reached) and all(map(zero_is_none, reached))

    def _in_a_list(self, function: Function, call: ast.Call) -> bool:
        reached = [each for each in self.calls.targets(function, call)[0] if not each.is_abstract]
        return bool(reached) and all(map(hands_out_a_list, reached))

    def _places(self, function: Function, source: Source, call: Call) -> tuple[Path, ...]:
        if source.into:
            return places_in_argument(self.calls.targets(function, call.at)[0], function, call, source)
        if source.handle is Handle.RESULT:
            places = in_result(self.calls.model, function, call, source.rest, *source.too)
            targets = self.calls.targets(function, call.at)[0] if source.told else ()
            key = given_as(targets, call, source.told) if targets else None
            return (*places, key) if key is not None and not is_temporary(key) else places
        if source.handle is Handle.RECEIVER:
            if call.receiver is None:
                return (PROCESS,)
            if source.origin == "discovered" and (again := spelled(call.at.func)) is not None:
                return (again,)
            targets, _, _ = self.calls.targets(function, call.at)
            itself = bool(targets) and all(returns_itself(target) for target in targets)
            return (call.receiver, call.target) if itself else (call.receiver,)
        if source.handle is Handle.NONE:
            return (PROCESS,)
        path = given_as(self.calls.targets(function, call.at)[0], call, source.argument)
        if path is None:
            return (PROCESS,)
        places = told_of(function, call, path, source.value)
        return (*places, call.target) if self._says_it_again(function, call) else places

    def _returns_one_more(self, function: Function, call: Call, source: Source) -> bool:
        """`self.baseline = self.serving.retain()`, which counts one more user and returns the object."""
        if source.handle is not Handle.RECEIVER or source.origin != "discovered" or source.opened:
            return False
        targets = self.calls.targets(function, call.at)[0]
        itself = bool(targets) and all(returns_itself(target) for target in targets)
        return itself and is_one_more_of_itself(function, call.at, self.ending_names(source.protocol))

    def _says_it_again(self, function: Function, call: Call) -> bool:
        """`return self.incref(block)`, which returns the block."""
        halves = [self.acquiring.get(target) for target in self.calls.targets(function, call.at)[0]]
        return bool(halves) and all(found is not None and found[1].echo for found in halves)


def _made_here(function: Function, source: Source, places: tuple[Path, ...]) -> bool:
    """Nobody else can reach the object that stands for the lease; keys in a new list are others' keys."""
    keys = source.handle is Handle.ARGUMENT and source.origin == "discovered"
    if source.handle is Handle.RECEIVER:
        places = places[:1]  # what `lock()` returns is the object itself
    return not keys and all(place[0] in function.graph.fresh_roots for place in places)


def _is_itself(source: Source) -> bool:
    """What is returned is the lease, and no object around it."""
    return source.handle is Handle.RESULT and not (source.rest or source.fresh or source.into)


def _discovered(pair: Pair, half: Half) -> Source:
    counts = half.name.verb in COUNTS and half.handle is not Handle.RESULT
    rest: Path = () if half.part is None else (f"[{half.part}]",)
    return Source(
        pair.name,
        "discovered",
        half.handle,
        half.value,
        half.argument,
        rest=rest,
        counts=counts,
        proposed=pair.proposed,
        by_key=half.by_key,
        flags=frozenset() if half.part is None else known_beside(half.function, half.part),
    )


def _first_match(
    protocols: Sequence[Protocol], names: tuple[str, ...], text: str
) -> tuple[Protocol, bool] | None:
    """The protocol that such a call acquires by, and whether what it takes is a lease that ends by itself."""
    guard = GUARD.search(text) is not None
    for protocol in protocols:
        if guard and protocol.origin == "built-in" and protocol.handle is Handle.RESULT:
            continue  # `pool.lock.acquire()` takes the lock; what lies in `smem` ends with its block
        for patterns, lease in ((protocol.lease, True), (protocol.acquire, False)):
            for pattern in patterns:
                if pattern.name.fullmatch(text) or any(pattern.name.fullmatch(name) for name in names):
                    return protocol, lease
    return None
