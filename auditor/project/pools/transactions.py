"""What is begun, and ends well or badly, by one method for each: an upload in parts that is completed or
aborted, a transaction that is committed or rolled back. Whatever goes over the wire in between, that there
are both ends says that one of them is owed.

    upload = store.begin(key)                        upload = Upload(store, key)
    store.finish(upload, tags)                       upload.complete()
    store.abort(upload)                              upload.abort()
"""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.flow.effects import Handle
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Class, Function, Module, last_part
from auditor.project.pools.bodies import returns_itself, returns_something
from auditor.project.pools.halves import LENDING, Half, Pair
from auditor.project.pools.lent_objects import needs_nothing
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import ACQUIRE_WORDS, Name, split, take_apart

BEGINNING = frozenset({"begin", "start", "open", "create", "initiate"})
DONE = frozenset({"complete", "commit", "finish", "finalize", "finalise", "end", "close", "seal", "publish"})
GIVEN_UP = frozenset({"abort", "cancel", "rollback", "discard", "revoke", "abandon"})
CALLED = frozenset({"upload", "multipart", "transaction", "txn", "tx"})
"""Words for what is such a thing by itself; a request that may be aborted is none."""

ACQUIRING, RELEASING = Name("acquire", frozenset()), Name("release", frozenset())


def transactions(module: Module, known: Set[Function]) -> Iterator[Pair]:
    """For those who use them to say. Of methods that are `known` to acquire all is said already."""
    for _, cls in sorted(module.classes.items()):
        methods = [each for _, each in sorted(cls.methods.items()) if _may_be_one(each)]
        done, given_up = (
            [each for each in methods if _begins_with(each, verbs)] for verbs in (DONE, GIVEN_UP)
        )
        if done and given_up:
            yield from _told(cls, methods, done, given_up, known)
            yield from _of_itself(cls, methods, done, given_up, known)


def _may_be_one(method: Function) -> bool:
    hidden = method.name.startswith("_") or method.is_static or method.is_property
    return not hidden and LENDING.isdisjoint(method.decorators)


def _begins_with(method: Function, verbs: Set[str]) -> bool:
    return not verbs.isdisjoint(split(method.name)[:1])


def _about(method: Function) -> tuple[str, ...]:
    """`multipart` of `create_multipart`"""
    return tuple(split(method.name)[1:])


def _told(
    cls: Class,
    methods: Sequence[Function],
    done: Sequence[Function],
    given_up: Sequence[Function],
    known: Set[Function],
) -> Iterator[Pair]:
    """`begin(key)` hands out what `finish(upload, tags)` and `abort(upload)` are told by one name."""
    for begins in methods:
        if begins in known or not (_begins_with(begins, BEGINNING) and returns_something(begins)):
            continue
        ends = [
            each for each in (*done, *given_up) if _about(each) == _about(begins) and own_parameters(each)
        ]
        first = {own_parameters(each)[0] for each in ends}
        both = any(each in done for each in ends) and any(each in given_up for each in ends)
        if both and len(first) == 1 and first.isdisjoint(own_parameters(begins)):
            back = tuple(Half(each, RELEASING) for each in ends)
            yield Pair(
                f"{cls.name}.{begins.name}()",
                cls,
                (Half(begins, ACQUIRING, by_shape=True),),
                back,
                proposed=True,
            )


def _of_itself(
    cls: Class,
    methods: Sequence[Function],
    done: Sequence[Function],
    given_up: Sequence[Function],
    known: Set[Function],
) -> Iterator[Pair]:
    """The object is one: from `begin()` on, or as soon as it is made."""
    ends = [each for each in (*done, *given_up) if needs_nothing(each)]
    if not (any(each in done for each in ends) and any(each in given_up for each in ends)):
        return
    starts = [each for each in methods if _begins_with(each, BEGINNING)]
    made = not starts and not CALLED.isdisjoint(split(cls.name))
    begins = cls.methods.get("__init__") if made else next(filter(needs_nothing, starts), None)
    if begins is None or begins in known or "__del__" in cls.methods or _keeps_a_lease(begins):
        return
    handle = Handle.RESULT if made else Handle.RECEIVER
    half = Half(begins, ACQUIRING, handle, by_shape=True, echo=not made and returns_itself(begins))
    back = tuple(Half(each, RELEASING, Handle.RECEIVER) for each in ends)
    yield Pair(f"{cls.name}.{begins.name}()", cls, (half,), back, proposed=True)


def _keeps_a_lease(begins: Function) -> bool:
    """`self.conn = self.pool.checkout()`: it is that which is owed, and either end may forget it."""
    values = [
        value.value if isinstance(value, ast.Await) else value
        for target, value in assignments(begins)
        if isinstance(target, ast.expr) and own_attribute(target, begins.owner or "") is not None
    ]
    asked = [last_part(each.func) for each in values if isinstance(each, ast.Call)]
    return any(take_apart(name, ACQUIRE_WORDS) is not None for name in asked)
