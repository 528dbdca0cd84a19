"""Finds pools in the tree: classes (and modules) that define both halves of a pair and whose bodies behave
like one.

Names only propose. The acquiring half must change the pool's state, or create and record, or pass on
another acquire, and must hand something out; the releasing half must change the pool's state or pass on
another release. A getter that changes nothing, an `allocated_gb`, a `release` with an empty body are not
halves of anything."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from auditor.flow.effects import Handle, Position, Value
from auditor.project.code.bindings import own_attribute, root_of
from auditor.project.code.candidates import may_end_elsewhere, may_have_shape, names_pair, names_undo
from auditor.project.code.class_model import ClassModel
from auditor.project.code.given_functions import handed_out
from auditor.project.code.modules import Class, Function, Module
from auditor.project.pools.across_bases import across_bases
from auditor.project.pools.also_ended import also_ended
from auditor.project.pools.bodies import not_shared, puts_another
from auditor.project.pools.by_belief import proposed_pairs
from auditor.project.pools.by_type import other_takers, typed_pairs
from auditor.project.pools.called_to_end import called_to_end
from auditor.project.pools.counted import counted_pairs, counting_functions
from auditor.project.pools.delegating import handing_on, hands_on
from auditor.project.pools.ended_objects import ended_objects
from auditor.project.pools.halves import (
    LENDING,
    Half,
    Pair,
    acquiring_half,
    only_passes,
    with_helpers,
)
from auditor.project.pools.instead import with_others
from auditor.project.pools.lasting import Lasting
from auditor.project.pools.lent_kinds import value_of
from auditor.project.pools.lent_objects import self_ending
from auditor.project.pools.lock_files import lock_file_pairs
from auditor.project.pools.marked_objects import marked_objects
from auditor.project.pools.modes import modes
from auditor.project.pools.of_functions import as_functions, as_methods, has_opposite
from auditor.project.pools.of_two_objects import pairs_of_two_objects
from auditor.project.pools.parts_lent import with_parts
from auditor.project.pools.put_back_by_itself import put_back_by_themselves
from auditor.project.pools.queues import PASSING_ON, is_store, passes_on
from auditor.project.pools.seen_as_classes import seen_as_classes, seen_in
from auditor.project.pools.settled import settled_pairs, settling, with_those_that_are_done
from auditor.project.pools.thrown_away import with_those_that_throw_away
from auditor.project.pools.told_by_itself import told_by_itself
from auditor.project.pools.transactions import transactions
from auditor.project.pools.waiting import with_waiting
from auditor.project.pools.wrapped_leases import with_ends_of_wrappers, wrapped_pairs
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.joint_takers import are_filled, joint_takers, taken_fields
from auditor.project.shapes.pool_state import called, changes_state, own_parameters
from auditor.project.shapes.reference_counts import counts_what_it_returns
from auditor.project.shapes.shapes import shapes
from auditor.project.shapes.use_counts import (
    lowered_by,
    noted_under,
    struck_off,
    struck_off_by_its_answer,
    waits_for,
)
from auditor.project.shapes.use_flags import marks_an_entry
from auditor.protocols.vocabulary import (
    ACQUIRE_WORDS,
    COUNTING,
    MARKS,
    RELEASE_WORDS,
    RELEASING,
    Name,
    pairs_with,
    split,
    take_apart,
)

CONTENTS = frozenset({"bytes", "byte"})
"""What a `BytesQueueBuffer` hands out, is read and done with."""

READING = frozenset({"parser", "lexer", "scanner"})
"""What such an object counts on and back is where it is in a text."""

REPORTED = re.compile(r"_*(?:on|handle)_\w+|\w+_callback")
"""Names of what is told that something is there: whoever waits for that gets it to keep."""

WORKING = re.compile(r"_*(?:process|handle|execute|run)_")
"""Names of what works off what it takes: `results = self._process_pending()` are what came of it."""

PUTTING_AWAY = frozenset({"delete", "remove", "save", "dump", "archive", "backup", "snapshot", "store"})
"""What `restore` undoes, of whatever is named behind it."""

STRIKING_OFF = frozenset(
    {"delete", "del", "remove", "discard", "unlink", "rm", "pop", "expire", "hdel", "srem"}
)
"""Words in the names of what takes an entry out of another object, be it far away."""


def discover(model: ClassModel, module: Module) -> Iterator[Pair]:
    """The pairs that one module defines. Objects that end themselves are lent where a module's names speak of
    lending: nobody owes whatever has a `close()`."""
    lending = names_pair(module.text) or names_undo(module.text)
    known: set[Function] = set()
    for _, cls in sorted(module.classes.items()):
        own = (with_waiting(pair, cls) for pair in _of_class(model, cls, known, lending=lending))
        yield from (with_parts(model, pair) for pair in own)
        yield from across_bases(model, cls, known, partial(_of_class, known=set(), lending=False))
    if may_end_elsewhere(module.text):
        yield from ended_objects(model, module, known)
    for _, cls in sorted(module.classes.items()):
        yield from marked_objects(model, cls, known)
    yield from pairs_of_two_objects(module, known)
    for _, cls in sorted(module.classes.items()):
        yield from wrapped_pairs(model, cls, known)
    yield from transactions(module, known)
    plain = [
        f
        for name, f in sorted(module.functions.items())
        if f.cls is None and f.parent is None and name != "<module>"
    ]
    of_module = list(_of_functions(model, module, plain))
    yield from of_module
    halves = {half.function.qualname for pair in of_module for half in (*pair.acquires, *pair.releases)}
    rest = [f for f in plain if f.qualname not in halves]
    if module.assigned:
        yield from proposed_pairs(model, None, rest, set())
    for seen in seen_as_classes(module, rest):
        pairs = _of_class(model, seen.cls, set(), lending=False)
        yield from (pair for each in pairs if (pair := seen.as_functions(each)) is not None)
    yield from _of_closures(model, module)


def _of_class(model: ClassModel, cls: Class, known: set[Function], *, lending: bool) -> Iterator[Pair]:
    """The pairs of its methods; those that acquire are `known` then."""
    methods = [method for name, method in sorted(cls.methods.items()) if not name.endswith("=")]
    lasting = Lasting(partial(model.lineage, cls))
    found = [_with_ends(model, pair, methods, lasting) for pair in _pairs_of(cls.name, cls, methods)]
    yield from found
    paired = {half.function for pair in found for half in pair.acquires}
    ending = list(self_ending(model, cls, [m for m in methods if m not in paired])) if lending else []
    yield from ending
    itself = list(put_back_by_themselves(cls, methods, paired))
    yield from itself
    handing = list(called_to_end(model, cls, methods, paired))
    yield from handing
    paired |= {half.function for pair in (*ending, *itself, *handing) for half in pair.acquires}
    by_shape = _by_shape(model, cls.name, cls, methods, paired)
    shaped = [_with_ends(model, pair, methods, lasting) for pair in by_shape]
    yield from shaped
    yield from _jointly(methods, methods, [*found, *shaped], paired)
    typed = [also_ended(pair, methods, lasting) for pair in typed_pairs(cls, methods, paired)]
    yield from typed
    paired |= {half.function for pair in typed for half in pair.acquires}
    others = list(other_takers(methods, [*found, *shaped, *typed], paired))
    yield from others
    paired |= {half.function for pair in others for half in pair.acquires}
    yield from _beside_bases(model, cls, methods, paired)
    told = [
        *(
            replace(pair, releases=(*pair.releases, *settling(pair.acquires, methods)))
            for pair in counted_pairs(model, cls, methods, paired)
        ),
        *settled_pairs(cls, methods, paired),
        *lock_file_pairs(cls, methods, paired),
        *_handing_on(cls, [m for m in methods if m not in paired]),
    ]
    told = [with_ends_of_wrappers(model, also_ended(pair, methods, lasting)) for pair in told]
    yield from told
    known |= paired
    taking = paired | {half.function for pair in told for half in pair.acquires}
    yield from _jointly(methods, methods, told, taking)  # whose count was the last puts it back
    ends = {half.function for pair in (*found, *ending, *shaped, *typed, *told) for half in pair.releases}
    yield from proposed_pairs(model, cls, methods, taking, ends, lasting)


def _with_ends(model: ClassModel, pair: Pair, methods: list[Function], lasting: Lasting) -> Pair:
    pair = with_those_that_are_done(with_others(pair, methods), methods)
    pair = with_those_that_throw_away(pair, methods)
    pair = also_ended(pair, methods, lasting) if pair.owner is not None else pair
    return with_ends_of_wrappers(model, pair)


def _of_closures(model: ClassModel, module: Module) -> Iterator[Pair]:
    """Of functions that one function makes and hands out together: what it has they have in common."""
    for factory in module.functions.values():
        handed = handed_out(factory)
        found = list(_by_shape(model, factory.name, None, list(handed), set())) if handed else []
        if handed and not found and (seen := seen_in(factory, handed)) is not None:
            pairs = map(seen.as_functions, _of_class(model, seen.cls, set(), lending=False))
            found = [pair for pair in pairs if pair is not None and not pair.proposed]
        if found:
            model.factories[factory] = handed
        yield from found


def _of_functions(model: ClassModel, module: Module, plain: list[Function]) -> Iterator[Pair]:
    """Of a pool that they are told first; of what they have in common, the module."""
    name = module.path.rpartition("/")[2].removesuffix(".py")
    seen = list(as_methods(plain))
    by_name = list(_pairs_of(name, None, seen))
    halves = {half.function for pair in by_name for half in pair.acquires}
    of_first = [*by_name, *_by_shape(model, name, None, [f for f in seen if f not in halves], set())]
    yield from (as_functions(pair, plain) for pair in of_first)
    taken = {half.function.qualname for pair in of_first for half in pair.acquires}
    rest = [function for function in plain if function.qualname not in taken]
    named = list(_pairs_of(name, None, rest))
    yield from named
    paired = {half.function for pair in named for half in pair.acquires}
    yield from counting_functions(name, [each for each in rest if each not in paired])
    shaped: list[Pair] = []
    if module.assigned and len(rest) > 1:
        shaped = list(_by_shape(model, name, None, [f for f in rest if has_opposite(f, rest)], paired))
        yield from shaped
    yield from _jointly(rest, rest, [*named, *shaped], paired)


def _handing_on(cls: Class, methods: list[Function]) -> Iterator[Pair]:
    acquiring, releasing = Name("acquire", frozenset()), Name("release", frozenset())
    for taker, giver in handing_on(methods):
        half = Half(taker, acquiring, value=value_of(taker), by_shape=True)
        yield Pair(cls.name, cls, (half,), (Half(giver, releasing),))


def _by_shape(
    model: ClassModel, name: str, cls: Class | None, methods: list[Function], paired: set[Function]
) -> Iterator[Pair]:
    """Whatever the halves are called, one undoes what the other does."""
    passing = not PASSING_ON.isdisjoint(split(name)[-1:])  # a `ChannelRegistry` is no channel
    passing = passing or not (CONTENTS | READING).isdisjoint(split(name))
    if passing or (cls is not None and not may_have_shape(cls.text)):
        return
    acquiring, releasing = Name("acquire", frozenset()), Name("release", frozenset())
    for found in shapes([m for m in methods if LENDING.isdisjoint(m.decorators)]):
        givers = [g for g in found.givers if not (_is_told_no_lease(g) or REPORTED.fullmatch(g.name))]
        if not givers or all(_asks_all(giver, found.takers) for giver in givers):
            continue
        taking = [m for m in found.takers if m not in paired and not WORKING.match(m.name)]
        takers = [acquiring_half(m, acquiring, givers, shaped=True) for m in taking]
        got = tuple(
            replace(half, by_shape=True)
            for half in takers
            if half is not None and (half.handle is Handle.RESULT or _is_key(half, givers))
        )
        if got and not told_by_itself(model, got[0].function, givers):
            paired.update(half.function for half in got)
            keyed = got[0].handle is Handle.ARGUMENT
            back = (
                Half(m, releasing, got[0].handle, 0 if keyed else _value_told(m, got[0].function))
                for m in givers
            )
            settled = (half for half in settling(got, methods) if half.function not in givers)
            yield Pair(name, cls, got, (*back, *settled))


def _asks_all(giver: Function, takers: Sequence[Function]) -> bool:
    """`generate()` asks its own `admit()`, and counts down when it is through: it owes, and is not owed."""
    asked = {own_attribute(call.func, giver.owner or "") for call in giver.calls}
    return all(taker.name in asked for taker in takers)


def _is_key(half: Half, givers: list[Function]) -> bool:
    """`assign(request)` enters what it takes under the request, and `unassign(request)` strikes that off."""
    told = own_parameters(half.function)
    key = told[half.argument : half.argument + 1] if isinstance(half.argument, int) else (half.argument,)
    noted = noted_under(half.function, key)
    return any(noted & struck_off(giver) for giver in givers)


def _value_told(giver: Function, taker: Function) -> Position:
    """Which parameter is put away: `idle[name] = worker` of `rest(name, worker)` is told the second."""
    other = not_shared(giver, taker)
    if other is not None and (puts_another(giver, taker) or struck_off_by_its_answer(taker, giver)):
        return other[0]
    told = own_parameters(giver)
    kept = (
        put.value.id
        for put in field_work(giver).put
        if isinstance(put.value, ast.Name) and isinstance(put.key, ast.Name) and put.key.id in told[:1]
    )
    return next((name for name in kept if name in told[1:]), 0)


def _jointly(
    own: list[Function], methods: list[Function], pairs: list[Pair], paired: set[Function]
) -> Iterator[Pair]:
    """Beside the halves of a known pair: which of the class's own methods also takes out of what the pair's
    releases fill. `methods` are all that may be asked."""
    acquiring = Name("acquire", frozenset())
    for pair in pairs:
        lending = any(half.handle is Handle.RESULT for half in pair.acquires)
        givers = [half.function for half in pair.releases]
        for method in joint_takers(methods, givers) if lending and not pair.acquires[0].name.kind else ():
            if method in paired or method not in own or not LENDING.isdisjoint(method.decorators):
                continue
            half = acquiring_half(method, acquiring, givers, shaped=True)
            if half is not None and half.handle is Handle.ARGUMENT and half.value is not Value.AMOUNT:
                # `claim_near(block)` hands out another one than the block that it is told
                half = Half(method, acquiring, value=value_of(method))
            if half is not None and half.handle is Handle.RESULT:
                paired.add(method)
                yield Pair(pair.name, pair.owner, (replace(half, by_shape=True),), pair.releases)


def _beside_bases(
    model: ClassModel, cls: Class, methods: list[Function], paired: set[Function]
) -> Iterator[Pair]:
    """A subclass may take out of what its base fills."""
    takes = cls.node.bases and any(
        way in cls.text for way in (".pop", "heappop(", ".remove(", ".discard(", "] = ")
    )
    fields = taken_fields(methods) if takes else set()
    for base in model.lineage(cls)[1:] if fields else ():
        inherited = [method for name, method in sorted(base.methods.items()) if not name.endswith("=")]
        if not are_filled(fields, inherited):
            continue
        found = list(_pairs_of(base.name, base, inherited))
        shaped = _by_shape(
            model, base.name, base, inherited, {half.function for pair in found for half in pair.acquires}
        )
        yield from _jointly(methods, [*inherited, *methods], [*found, *shaped], paired)


def _pairs_of(name: str, owner: Class | None, functions: list[Function]) -> Iterator[Pair]:
    """One pair for what is handed out and counted, one for each kind of mark: a pin is ended by no count."""
    acquires, releases = [], []
    for function in functions:
        if function.is_property:
            continue
        acquiring = take_apart(function.name, ACQUIRE_WORDS)
        if acquiring is not None:
            acquires.append((function, acquiring))
        releasing = take_apart(function.name, RELEASE_WORDS) if _may_release(function) else None
        if releasing is not None and not _restores_what_was_put_away(releasing, functions):
            releases.append((function, releasing))
    halves = _behaving(acquires, releases)
    if halves is None:
        return
    halves = halves[0], halves[1] + tuple(settling(halves[0], functions))
    for kind in ("", *sorted(MARKS)):
        got, given = (tuple(half for half in side if half.name.kind == kind) for side in halves)
        for mode, (taking, giving) in modes(got, given, functions) if got and given else ():
            yield Pair(".".join(filter(None, (name, mode, kind))), owner, taking, giving)


def _may_release(function: Function) -> bool:
    """`with reserve_free_port() as port:` gives back nothing: what it reserves is free."""
    begins = take_apart(split(function.name)[0], ACQUIRE_WORDS) if split(function.name) else None
    return LENDING.isdisjoint(function.decorators) and begins is None


def _restores_what_was_put_away(releasing: Name, functions: list[Function]) -> bool:
    """`restore_run(run_id)` undoes `delete_run(run_id)`: it gives back nothing of what `get_run()` got."""
    away = (take_apart(each.name, PUTTING_AWAY) for each in functions) if releasing.verb == "restore" else ()
    return any(each is not None and each.affix == releasing.affix for each in away)


def _behaving(
    acquires: list[tuple[Function, Name]], releases: list[tuple[Function, Name]]
) -> tuple[tuple[Half, ...], tuple[Half, ...]] | None:
    got, given = [], []
    for function, name in acquires:
        partners = [
            (other, its) for other, its in releases if pairs_with(name, its) and other is not function
        ]
        partners = [
            (other, its)
            for other, its in partners
            if _gives_back(other, name)
            and not (name.verb == "up" and waits_for(other, lowered_by(other, [function])))
            and (
                marks_an_entry(function, [other])
                or lowered_by(function, [other])
                or counts_what_it_returns(function, [other])
                or hands_on(function, [other])
                or not (is_store(function, name, other) or passes_on(function, name, its))
            )
        ]
        if not function.is_method:  # functions of a module share no object: only names tie them together
            partners = [(other, its) for other, its in partners if name.affix & its.affix]
        half = acquiring_half(function, name, [other for other, _ in partners]) if partners else None
        if half is not None:
            got.append(half)
            partners += [each for each in releases if _is_asked_by(partners, each, function)]
            given += [Half(other, its, half.handle, _told_of(other, half)) for other, its in partners]
    if not got:
        return None
    unique = {half.function: half for half in given}
    return tuple(got), tuple(unique.values())


def _told_of(release: Function, acquire: Half) -> Position:
    """`put(address, link)` after `get(address)`: the link, by that name; 0 for what comes first."""
    told = not_shared(release, acquire.function) if acquire.handle is Handle.RESULT else None
    return told[0] if told is not None and told[0] != own_parameters(release)[0] else 0


def _gives_back(function: Function, acquiring: Name) -> bool:
    """The releasing half changes something, or passes on to a function that releases; interfaces are
    believed."""
    if len(own_parameters(function)) == 0 and acquiring.verb not in COUNTING and acquiring.verb != "acquire":
        return False  # it is given nothing back: a `free()` of the pool itself
    if function.is_abstract:
        return not only_passes(function)
    if _is_told_no_lease(function):
        return False
    return (
        any(map(changes_state, with_helpers([function])))
        or any(RELEASING.fullmatch(name) or take_apart(name, RELEASE_WORDS) for name in called(function))
        or _strikes_off_elsewhere(function)
    )


def _strikes_off_elsewhere(function: Function) -> bool:
    """`self.kv.delete_if(grant.key, grant.owner)`, of what it is told."""
    told = set(own_parameters(function))
    return any(
        isinstance(call.func, ast.Attribute)
        and own_attribute(call.func.value, function.owner or "") is not None
        and not STRIKING_OFF.isdisjoint(split(call.func.attr))
        and any(root_of(each) in told for each in call.args)
        for call in function.calls
    )


def _is_asked_by(
    releases: list[tuple[Function, Name]], other: tuple[Function, Name], acquires: Function
) -> bool:
    """`do_release(token)` beside `do_acquire(token)`: what it does is outside; `release()` has it done."""
    began, ended = split(acquires.name), split(other[0].name)
    undoes = len(began) == len(ended) > 1 and began[:-1] == ended[:-1]
    known = {function for function, _ in releases}
    return undoes and other[0] not in known and any(other[0].name in called(each) for each in known)


def _is_told_no_lease(function: Function) -> bool:
    """`give_back_step(self, idle_seconds: float)`: no lease is a fraction of anything, or a switch; nor
    another object like this one, of `restore_fields(self, other: "Output")`."""
    first = own_parameters(function)[:1]
    arguments = getattr(function.node, "args", None)
    named = [*arguments.posonlyargs, *arguments.args] if isinstance(arguments, ast.arguments) else []
    none = {"float", "bool"} | ({function.cls.name} if function.cls is not None else set())
    if function.name.startswith("restore"):
        none |= {"dict", "Mapping"}  # what was saved, of an object that is made anew
    return any(
        each.arg in first
        and each.annotation
        and ast.unparse(each.annotation).partition("[")[0].strip("'\"") in none
        for each in named
    )
