"""Which of the proposed pairs are pairs: their users say so (Engler et al., "Bugs as Deviant Behavior", SOSP
2001).

Who ends on all his ways what he began believes that it has to be ended; who never does believes the
opposite. Those who do it on some ways only are the ones that the question is about: they count for nothing,
but must not be all that there is."""

import ast
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set

from auditor.flow.effects import Handle
from auditor.project.code.bindings import TEST_FILE, own_attribute
from auditor.project.code.modules import Class, Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.outcome import Outcome, loses_normally
from auditor.project.pools.by_type import MAKING
from auditor.project.pools.kept_for import counted_for, kept_for
from auditor.project.shapes.changes import Did, all_changes
from auditor.protocols.vocabulary import split, undoes

AT_MOST = 2
"""So many functions may forget it on one of their ways for each that does not."""

OUTNUMBERED = 4
"""Where more than two never do, so many must for each of them: that many do not all forget."""

MOSTLY = 2
"""What a body alone calls a pool is none where more than three users never end it, and over so many times
those that do."""

ENOUGH = 40
"""So many users are asked before it may be clear that those to come change nothing."""

IN_DOUBT = 3
"""So many times as many might end it, and it would not be believed."""

SHOWING = frozenset({"get", "fetch"})
"""Verbs of what shows something, more often than they lend it."""


def disbelieved(recogniser: Recogniser, outcomes: Collection[Outcome]) -> Set[str]:
    """The proposed pairs, by name, of which this is not believed; those by shape that nearly all forget."""
    by_pair: dict[str, list[Outcome]] = {
        pair.name: [] for pair, _ in recogniser.acquiring.values() if pair.proposed
    }
    for outcome in outcomes if by_pair else ():
        if outcome.acquisition.protocol in by_pair and not TEST_FILE.search(outcome.function.module.path):
            by_pair[outcome.acquisition.protocol].append(outcome)
    believed = {name for name, users in by_pair.items() if _is_believed(recogniser, users)}
    beside = _with_the_same_ends(recogniser, by_pair.keys())
    return _mostly_forgotten(recogniser, outcomes) | {
        name
        for name, users in by_pair.items()
        if name not in believed
        and not any(
            _is_believed(recogniser, [*users, *by_pair[other]]) for other in beside[name] & believed if users
        )
    }


def _mostly_forgotten(recogniser: Recogniser, outcomes: Collection[Outcome]) -> Set[str]:
    """Of pairs that nobody called so, or only by an everyday verb: an alias that counts its uses is not owed
    for that, nor what `get_state` answers to `put_state`. What the pool's own class does says nothing of its
    users."""
    shaped: dict[str, Class | None] = {}
    forgiven: dict[str, int] = {}
    for function, (pair, half) in recogniser.acquiring.items():
        everyday = not half.by_shape and half.name.verb in SHOWING and not _takes_out(function)
        if not pair.proposed and (half.by_shape or everyday):
            shaped[pair.name] = pair.owner
            forgiven[pair.name] = 0 if everyday else AT_MOST + 1 if _takes_out(function) else 1
    never, always = Counter[str](), Counter[str]()
    for outcome in outcomes:
        name, lease = outcome.acquisition.protocol, outcome.lease
        if name in shaped and not TEST_FILE.search(outcome.function.module.path):
            of_others = outcome.function.cls is not shaped[name]
            never[name] += loses_normally(lease) and not (lease.released or lease.handed_over)
            always[name] += lease.released or (of_others and _is_ended_by_its_class(recogniser, outcome))
    return {name for name in shaped if never[name] > max(forgiven[name], MOSTLY * always[name])}


def never_closed(outcomes: Collection[Outcome]) -> Set[str]:
    """Classes whose objects hold something open, which nearly all who make one leave to itself: a future
    whose field is emptied by a callback."""
    never, always = Counter[str](), Counter[str]()
    for outcome in outcomes:
        if outcome.acquisition.opened and not TEST_FILE.search(outcome.function.module.path):
            name, loses = outcome.acquisition.protocol, loses_normally(outcome.lease)
            never[name] += loses and not (outcome.lease.released or outcome.lease.handed_over)
            always[name] += outcome.lease.released and not loses
    return {name for name in never if never[name] > max(AT_MOST, MOSTLY * always[name])}


def _with_the_same_ends(recogniser: Recogniser, names: Set[str]) -> Mapping[str, Set[str]]:
    """`try_take()` beside `take()`, which `put()` ends both, and which neither hands anything out: who
    believes in the one believes in the other."""
    alike: dict[str, list[object]] = {}
    words: dict[str, Set[str]] = {}
    for function, (pair, half) in recogniser.acquiring.items():
        if pair.name in names and half.handle is not Handle.RESULT:
            alike[pair.name] = [pair.owner, half.handle, {each.function for each in pair.releases}]
            words[pair.name] = {*split(function.name)}
    return {
        name: {
            other
            for other, told in alike.items()
            if other != name and told == alike.get(name) and words[name] & words[other]
        }
        for name in names
    }


def is_clearly_none(recogniser: Recogniser, users: Sequence[Outcome]) -> bool:
    """Whether so many of its first users do otherwise that the rest need not be followed: hundreds ask for
    `get_parent(node)`, and nobody ends it."""
    asked = [user for user in users if not TEST_FILE.search(user.function.module.path)]
    return len(asked) >= ENOUGH and not _is_believed(recogniser, asked, IN_DOUBT)


def _is_believed(recogniser: Recogniser, users: Sequence[Outcome], times: int = 1) -> bool:
    """If so many times as many ended it."""
    losing = [user for user in users if loses_normally(user.lease)]
    kept = (user for user in users if not loses_normally(user.lease))
    ended = sum(user.lease.released or _is_ended_by_its_class(recogniser, user) for user in kept)
    always = times * ended
    sometimes = sum(user.lease.released or user.lease.handed_over for user in losing)
    never = len(losing) - sometimes
    dry = 0 < never == always and not sometimes and _runs_dry(recogniser, users)
    few = never < always or dry if never <= AT_MOST else OUTNUMBERED * never <= always
    keyed = sum(user.acquisition.handle is Handle.ARGUMENT for user in users)  # ended by who has the key
    others = len(users) - len(losing) - ended - keyed
    return few and sometimes <= AT_MOST * always and others <= OUTNUMBERED * always


def _runs_dry(recogniser: Recogniser, users: Sequence[Outcome]) -> bool:
    """What is lent is taken out of something, or there may be none: then as many may forget it as do not."""
    asked = {user.acquisition.protocol for user in users}
    return any(
        half.handle is Handle.RESULT and (_takes_out(function) or _may_refuse(function))
        for function, (pair, half) in recogniser.acquiring.items()
        if pair.name in asked
    )


def _takes_out(function: Function) -> bool:
    return any(change.did is Did.OUT for change in all_changes(function))


def _may_refuse(function: Function) -> bool:
    answers = [node.value for node in function.statements if isinstance(node, ast.Return)]
    none = [
        each for each in answers if each is None or (isinstance(each, ast.Constant) and each.value is None)
    ]
    return 0 < len(none) < len(answers)


def _is_ended_by_its_class(recogniser: Recogniser, user: Outcome) -> bool:
    """It is kept in a field, and another method of the class gives something back; or it is begun under a
    key, and another method, by a name that undoes it, ends it of the same object."""
    cls = user.function.cls if user.stored or user.acquisition.keyed else None
    if cls is not None and user.stored and _is_asked_to_end(recogniser, user, cls):
        return True
    if cls is not None and not user.stored:
        return _is_undone_by_its_class(recogniser, user, cls)
    return cls is not None and any(
        recogniser.ends(target, user.lease.protocol)
        for method in cls.methods.values()
        if method is not user.function
        for call in method.calls
        for target in recogniser.calls.targets(method, call)[0]
    )


def _is_asked_to_end(recogniser: Recogniser, user: Outcome, cls: Class) -> bool:
    """`self.feed.close()`, of the field in which it is kept, though nobody says what that is."""
    own = user.function.owner or ""
    fields = {path[1][1:] for _, path in user.stored if len(path) == 2 and path[0] == own}
    names = recogniser.ending_names(user.lease.protocol) if fields else frozenset()
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in names
        and own_attribute(call.func.value, method.owner or "") in fields
        for method in cls.methods.values()
        if method is not user.function
        for call in method.calls
    )


def _is_undone_by_its_class(recogniser: Recogniser, user: Outcome, cls: Class) -> bool:
    """`self.rows.seat(self.rid)` here and `self.rows.unseat(self.rid)` there."""
    begun = user.call.func
    if not isinstance(begun, ast.Attribute):
        return False
    kept = _is_kept_for_its_key(recogniser, user)
    if not kept and not MAKING.isdisjoint(split(begun.attr)[:1]):
        return False
    whom = ast.unparse(begun.value)
    return any(
        isinstance(call.func, ast.Attribute)
        and (kept or undoes(call.func.attr, begun.attr))
        and ast.unparse(call.func.value) == whom
        and recogniser.releases(method, call, 0, user.lease.protocol)
        for method in cls.methods.values()
        if method is not user.function
        for call in method.calls
    )


def _is_kept_for_its_key(recogniser: Recogniser, user: Outcome) -> bool:
    """By the bodies of both, whatever they are called."""
    targets = recogniser.calls.targets(user.function, user.call)[0]
    pairs = [(each, recogniser.acquiring[each][0]) for each in targets if each in recogniser.acquiring]
    halves = [(begins, [half.function for half in pair.releases]) for begins, pair in pairs]
    return bool(halves) and all(
        kept_for(begins, ends) is not None or counted_for(begins, ends) for begins, ends in halves
    )
