"""Which calls give back or take over what they are given: settings, then pairs of the tree, then the built-in
tables."""

import ast
from collections.abc import Sequence, Set

from auditor.flow.effects import Handle, Position, Value
from auditor.flow.operands import PROCESS_POSITION
from auditor.ir.calls import PUTTING
from auditor.project.code.aliases import Aliases
from auditor.project.code.bindings import told_anything
from auditor.project.code.calls import Calls, accepts, is_bound, parameter_for
from auditor.project.code.modules import Class, Function
from auditor.project.pools.called_like import asked_for_both, called_like_pool, names_an_amount
from auditor.project.pools.halves import Half, Pair
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import called
from auditor.protocols.protocol import Protocol
from auditor.protocols.vocabulary import LEASE_METHODS, MARKS, RELEASE_WORDS, RELEASING, take_apart
from auditor.source.imports import dotted_text

FOR_GOOD = frozenset({"disconnect", "aclose", "terminate", "logout", "quit"})
"""Methods that end what a declared pool lent, besides those that protocols list: `line.disconnect()`."""

PARTING = frozenset({"retire", "discard", "scrap", "condemn", "dispose", "decommission", "publish"})
"""Other words for parting with a lease, where a pool's own method that is told it is so called."""


class Releases:
    """Answers by resolved function where there is one, else by patterns, at last by the name."""

    def __init__(self, calls: Calls, protocols: Sequence[Protocol], pairs: Sequence[Pair]) -> None:
        self.calls = calls
        self.aliases = Aliases()
        self.declared = tuple(protocol for protocol in protocols if protocol.origin == "settings")
        self.built_in = tuple(protocol for protocol in protocols if protocol.origin == "built-in")
        self._speechless = {
            protocol.name
            for protocol in protocols
            if protocol.handle is Handle.RESULT and not any(pattern.on_lease for pattern in protocol.release)
        }
        self._held_themselves = {
            protocol.name for protocol in self.declared if protocol.handle is not Handle.RESULT
        }
        self.of_library = {
            protocol.name
            for protocol in self.built_in
            if protocol.handle is Handle.RESULT and protocol.value is Value.OBJECT
        }
        self.ending_themselves = {
            protocol.name
            for protocol in protocols
            if protocol.name in self.of_library or _by_methods_alone(protocol)
        }
        self._stores: dict[str, tuple[Pair, Set[str]]] = {}
        self.closing: dict[Function, set[str]] = {}  # methods that end their own object; the classes it is of
        self.releasing: dict[Function, tuple[Pair, Half]] = {}
        self._proposed: dict[tuple[Function, str], tuple[Pair, Half]] = {}  # of which one may end several
        self.called = {pair.name for pair in pairs if pair.called}
        """Of what these lend, a call of it is the end."""
        self._ends_of: dict[str, list[tuple[Pair, Half]]] = {}
        for pair in pairs:
            self._ends_of.setdefault(pair.name, []).extend((pair, half) for half in pair.releases)
            self._stores[pair.name] = pair, stores_of(pair)
            for half in pair.releases:
                self.releasing.setdefault(half.function, (pair, half))
                if pair.proposed:
                    self._proposed[half.function, pair.name] = pair, half

    def forget_ends(self, protocols: Set[str]) -> None:
        """Of pairs that are none; what ends others as well still ends those."""
        self._proposed = {at: its for at, its in self._proposed.items() if at[1] not in protocols}
        kept = {at: its for at, its in self.releasing.items() if its[0].name not in protocols}
        self.releasing = {at[0]: its for at, its in reversed(self._proposed.items())} | kept

    def ends(self, target: Function, protocol: str) -> bool:
        """Whether the tree's own function gives back what is lent under this protocol."""
        first = self.releasing.get(target)
        return (target, protocol) in self._proposed or (first is not None and first[0].name == protocol)

    def ending_names(self, protocol: str) -> frozenset[str]:
        """Names of the functions that give back what is lent under this protocol, by the settings, the
        built-in tables or the tree's own pools."""
        told = (each for each in (*self.declared, *self.built_in) if each.name == protocol)
        declared = (pattern.last_word for each in told for pattern in each.release)
        own = (function.name for function, name in self._proposed if name == protocol)
        return frozenset(function.name for function in self.ends_of(protocol)).union(declared, own)

    def ends_of(self, protocol: str) -> list[Function]:
        """The functions of the tree that give back what is lent under this protocol."""
        return [function for function, (pair, _) in self.releasing.items() if pair.name == protocol]

    def taking_names(self, protocol: str) -> frozenset[str]:
        """Names of the methods of a pool of the tree that lend under this protocol."""
        pairs = (pair for pair, _ in self._ends_of.get(protocol, ()))
        return frozenset(half.function.name for pair in pairs for half in pair.acquires)

    def owner_of(self, protocol: str) -> Class | None:
        """The class of the tree that lends under this protocol."""
        pair, _ = self._stores.get(protocol, (None, frozenset()))
        return pair.owner if pair is not None else None

    def ends_of_other_modes(self, protocol: str) -> frozenset[str]:
        """`release_write`, of what is held by `acquire_read`."""
        others = {name for name in self._ends_of if is_another_mode(protocol, name)}
        return frozenset().union(*map(self.ending_names, others))

    def begins_of_other_modes(self, protocol: str) -> frozenset[str]:
        others = {name for name in self._ends_of if is_another_mode(protocol, name)}
        return frozenset().union(*map(self.taking_names, others))

    def ending_names_of_class(self, protocol: str) -> frozenset[str]:
        """Those that any pair of the pool's class has: `unpin` of `pin` ends what `mint` lends as well."""
        lender = protocol.partition(".")[0]
        alike = {pair.name for pair, _ in self.releasing.values() if pair.name.partition(".")[0] == lender}
        return frozenset().union(*map(self.ending_names, {protocol, *alike}))

    def releases(
        self, function: Function, call: ast.Call, position: Position, protocol: str = ""
    ) -> bool | None:
        """True: the operand is given back. None: neither settings nor pairs nor tables say so."""
        meant = self.aliases.meant(function, call)
        if meant is not None and isinstance(position, int) and position >= 0:
            shift = len(meant[1].args) - len(call.args)
            return self._releases(*meant, position + shift, protocol)
        return self._releases(function, call, position, protocol)

    def _releases(self, function: Function, call: ast.Call, position: Position, protocol: str) -> bool | None:
        if position == -1 and protocol in self.called and not isinstance(call.func, ast.Attribute):
            return True
        targets, constructed, dotted = self.calls.targets(function, call)
        text = callee_text(call)
        names = names_of(targets, constructed, dotted)
        if self._release_pattern(self.declared, names, text, call, position, protocol):
            return True
        named = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if position == -1 and protocol in self._speechless and named in FOR_GOOD:
            return True
        for target in targets:
            if position == -1 and protocol and protocol in self.closing.get(target, ()):
                return True
            if (told := self._told_to_end(target, protocol)) is not None:
                pair, half = told
                if protocol and half.name.kind != kind_of(protocol):
                    return None
                if protocol != pair.name and pair.proposed:
                    continue  # of what others lend it says nothing
                if half.handle is Handle.RECEIVER and is_another_mode(protocol, pair.name):
                    return None
                if half.handle is Handle.NONE:
                    return position == PROCESS_POSITION
                if half.handle is Handle.RECEIVER or not told_anything(call):
                    return position == -1
                return position != -1 and is_told_of_it(half, call, position)
        if position == 0 and any(self._parts_with(target, protocol) for target in targets):
            return True
        if (targets and not all(target.is_abstract for target in targets)) or constructed is not None:
            return None
        if not targets and self._put_back_by_hand(function, call, position, protocol):
            return True
        if not targets and dotted is None and self._ended_like(function, call, position, protocol):
            return True
        names = names_of(targets, None, dotted)
        return True if self._release_pattern(self.built_in, names, text, call, position, protocol) else None

    def _parts_with(self, target: Function, protocol: str) -> bool:
        """`pool.retire(worker)`: what is not to come back to the pool, or is its readers' from here on."""
        pair, _ = self._stores.get(protocol, (None, frozenset()))
        own = pair is not None and pair.owner is not None and target.cls is pair.owner
        return own and target.name in PARTING

    def _told_to_end(self, target: Function, protocol: str) -> tuple[Pair, Half] | None:
        """An end, or what overrides one and asks it: `super().do_release(token)`. What gives back by another
        end what it exchanges, `bigger = pool.regrow(span)`, may refuse: its body tells."""
        if target in self.releasing:
            if _may_answer_none(target) and self._asks_another_end(target):
                return None
            return self._proposed.get((target, protocol)) or self.releasing[target]
        lineage = self.calls.model.lineage(target.cls)[1:] if target.cls is not None else ()
        overridden = (cls.methods[target.name] for cls in lineage if target.name in cls.methods)
        ended = next((self.releasing[each] for each in overridden if each in self.releasing), None)
        return ended if ended is not None and target.name in called(target) else None

    def _asks_another_end(self, target: Function) -> bool:
        family = target.cls.methods if target.cls is not None else {}
        asked = (family.get(name) for name in called(target))
        return any(each is not target and each in self.releasing for each in asked if each is not None)

    def _put_back_by_hand(
        self, function: Function, call: ast.Call, position: Position, protocol: str
    ) -> bool:
        """`link.numbers.append(number)`: into what the pool takes from, by somebody else."""
        pair, stores = self._stores.get(protocol, (None, frozenset()))
        match call.func:
            case ast.Attribute(value=ast.Attribute(value=pool, attr=field), attr=method) if pair is not None:
                if method not in PUTTING or field not in stores or position != 0:
                    return False
                if isinstance(pool, ast.Name) and pool.id == function.owner:
                    return False  # the pool's own methods keep its books
                known = self.calls.model.type_of(function, pool)
                return called_like_pool(pool, pair) if known is None else known is pair.owner
        return False

    def _ended_like(self, function: Function, call: ast.Call, position: Position, protocol: str) -> bool:
        """`self.watchdog.stop(key)` of an unknown receiver that is called like the pool that lent it: whoever
        is believed to have lent by that is believed to take back by it."""
        if not isinstance(call.func, ast.Attribute) or position == -1:
            return False
        receiver, name = call.func.value, call.func.attr
        return any(
            half.function.name == name
            and half.handle in (Handle.RESULT, Handle.ARGUMENT)
            and accepts(half.function, call)
            and is_told_of_it(half, call, position)
            and (
                called_like_pool(receiver, pair)
                or (
                    half.handle is Handle.ARGUMENT
                    and names_an_amount(call)
                    and asked_for_both(function.module, receiver, pair, names_an_amount)
                )
            )
            for pair, half in self._ends_of.get(protocol, ())
        )

    def declares(
        self, function: Function, call: ast.Call, position: Position, protocol: Protocol | None = None
    ) -> bool:
        """Whether the settings, or one protocol of theirs, say that the operand is given back."""
        names = names_of(*self.calls.targets(function, call))
        protocols = self.declared if protocol is None else (protocol,)
        return self._release_pattern(protocols, names, callee_text(call), call, position)

    def _release_pattern(
        self,
        protocols: Sequence[Protocol],
        names: tuple[str, ...],
        text: str,
        call: ast.Call,
        position: Position,
        of: str = "",
    ) -> bool:
        """`of`: the lease's protocol, whose own words for `lease.close()` are the only ones if it has any; a
        lock and what a pool of the tree hands out are not ended by the words for processes. What is held or
        marked under one declared protocol may be so under another as well, and each has its own end."""
        for protocol in protocols:
            if of in self._held_themselves and of != protocol.name:
                continue
            for pattern in protocol.release:
                if pattern.on_lease:
                    if (
                        position == -1
                        and (of in ("", protocol.name) or of in self._speechless)
                        and isinstance(call.func, ast.Attribute)
                        and pattern.name.fullmatch(call.func.attr)
                    ):
                        return True
                elif pattern.name.fullmatch(text) or any(pattern.name.fullmatch(name) for name in names):
                    if protocol.handle is Handle.RECEIVER and not pattern.explicit:
                        if position == -1:
                            return True
                    elif (
                        (protocol.handle is Handle.NONE and not pattern.operands)
                        or position in pattern.operands
                        or (isinstance(position, str) and not pattern.explicit)
                    ):
                        return True
        return False

    def release_source(self, function: Function, call: ast.Call) -> tuple[str, str] | None:
        """(protocol, origin) of a call that releases something."""
        targets, constructed, dotted = self.calls.targets(function, call)
        for target in targets:
            if target in self.releasing:
                return self.releasing[target][0].name, "discovered"
        positions: tuple[Position, ...] = (
            -1,
            *range(len(call.args)),
            *(k.arg for k in call.keywords if k.arg),
        )
        names, text = names_of(targets, constructed, dotted), callee_text(call)
        known = targets and not all(target.is_abstract for target in targets)
        for protocol in (*self.declared, *(() if known else self.built_in)):
            if any(self._release_pattern((protocol,), names, text, call, position) for position in positions):
                return protocol.name, protocol.origin
        return None

    def transfers(self, function: Function, call: ast.Call, position: Position) -> bool:
        targets, constructed, dotted = self.calls.targets(function, call)
        names, text = names_of(targets, constructed, dotted), callee_text(call)
        return any(
            position in pattern.operands
            and (pattern.name.fullmatch(text) or any(pattern.name.fullmatch(n) for n in names))
            for protocol in (*self.declared, *self.built_in)
            for pattern in protocol.transfer
        )

    def releases_by_name(self, call: ast.Call, position: Position, value: Value) -> bool:
        """Where nothing is known of the callee: `pool.free(x)`, `release_block(x)`, `lease.release()`."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if position == -1 and isinstance(call.func, ast.Attribute):
            # what is called a tensor here for its pool's name alone has no other method so called
            said = value is Value.TENSOR and take_apart(name, RELEASE_WORDS) is not None
            return name in LEASE_METHODS or said
        if position == -1:
            return False
        return RELEASING.fullmatch(name) is not None


def _may_answer_none(function: Function) -> bool:
    """`return None` on one way, and something that has a name on another."""
    answers = [node.value for node in function.statements if isinstance(node, ast.Return)]
    none = any(each is None or (isinstance(each, ast.Constant) and each.value is None) for each in answers)
    return none and any(isinstance(each, ast.Name) for each in answers)


def stores_of(pair: Pair) -> Set[str]:
    """The fields out of which what is lent is taken."""
    lending = (half.function for half in pair.acquires if half.handle is Handle.RESULT)
    return {field for each in lending for field, _ in field_work(each).taken}


def kind_of(protocol: str) -> str:
    """`pin` of the discovered protocol `Entry.pin`."""
    kind = protocol.rpartition(".")[2]
    return kind if kind in MARKS else ""


def is_another_mode(protocol: str, other: str) -> bool:
    """`SharedLock.read`, and `SharedLock.write` of the same lock."""
    owner, _, mode = protocol.partition(".")
    apart = protocol != other and bool(mode) and other.startswith(f"{owner}.")
    return apart and kind_of(protocol) == kind_of(other)


def is_told_of_it(half: Half, call: ast.Call, position: Position) -> bool:
    """Of `put(address, link)` the link is given back."""
    if not isinstance(half.argument, str):
        return True
    bound = is_bound(half.function, call)
    return parameter_for(half.function, position, bound) == half.argument


def _by_methods_alone(protocol: Protocol) -> bool:
    """A list of leases has no `close()`; where there is another way to end them, it may be a list."""
    ends = protocol.release
    return protocol.handle is Handle.RESULT and bool(ends) and all(pattern.on_lease for pattern in ends)


def callee_text(call: ast.Call) -> str:
    return dotted_text(call.func) or ast.unparse(call.func)


def names_of(targets: Sequence[Function], constructed: Class | None, dotted: str | None) -> tuple[str, ...]:
    """Dotted names, the last parts alone included, that a pattern may be written against."""
    full = [dotted] if dotted is not None else []
    if constructed is not None:
        full.append(f"{_module_name(constructed.module.path)}.{constructed.qualname}")
    else:
        full += [f"{_module_name(target.module.path)}.{target.qualname}" for target in targets]
    names = []
    for name in full:
        parts = name.split(".")
        names += (
            [".".join(parts[start:]) for start in range(len(parts))]
            if constructed is None and dotted is None
            else [name]
        )
    return tuple(names)


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
