"""What is begun, and ends well or badly, by one method for each: an upload in parts that is completed or
aborted, a transaction that is committed or rolled back. Whatever goes over the wire in between, that there
are both ends says that one of them is owed.

    upload = store.begin(key)                        upload = Upload(store, key)
    store.finish(upload, tags)                       upload.complete()
    store.abort(upload)                              upload.abort()
"""

import ast
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial

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


@dataclass(frozen=True, slots=True)
class Ends:
    """Methods of one class for its good end, and for its bad one."""

    done: Sequence[Function]
    given_up: Sequence[Function]

    def such(self, wanted: Callable[[Function], object]) -> list[Function]:
        """Those that are `wanted`; none where one of the two kinds has no such method."""
        done, given_up = (list(filter(wanted, each)) for each in (self.done, self.given_up))
        return [*done, *given_up] if done and given_up else []


def transactions(module: Module, known: Set[Function]) -> Iterator[Pair]:
    """For those who use them to say. Of methods that are `known` to acquire all is said already."""
    for _, cls in sorted(module.classes.items()):
        methods = [each for _, each in sorted(cls.methods.items()) if _may_be_one(each)]
        ends = Ends(*([each for each in methods if _begins_with(each, verbs)] for verbs in (DONE, GIVEN_UP)))
        starts = [each for each in methods if _begins_with(each, BEGINNING)]
        for half, back in (*_told(starts, ends), *_of_itself(cls, starts, ends)):
            if half.function not in known:
                yield Pair(f"{cls.name}.{half.function.name}()", cls, (half,), tuple(back), proposed=True)


def _may_be_one(method: Function) -> bool:
    hidden = method.name.startswith("_") or method.is_static or method.is_property
    return not hidden and LENDING.isdisjoint(method.decorators)


def _begins_with(method: Function, verbs: Set[str]) -> bool:
    return not verbs.isdisjoint(split(method.name)[:1])


def _about(method: Function) -> tuple[str, ...]:
    """`multipart` of `create_multipart`"""
    return tuple(split(method.name)[1:])


def _told(starts: Sequence[Function], ends: Ends) -> Iterator[tuple[Half, list[Half]]]:
    """`begin(key)` hands out what `finish(upload, tags)` and `abort(upload)` are told by one name."""
    for begins in filter(returns_something, starts):
        back = ends.such(partial(_is_about, _about(begins)))
        first = {own_parameters(each)[0] for each in back}
        if len(first) == 1 and first.isdisjoint(own_parameters(begins)):
            yield Half(begins, ACQUIRING, by_shape=True), [Half(each, RELEASING) for each in back]


def _is_about(what: tuple[str, ...], end: Function) -> bool:
    return _about(end) == what and bool(own_parameters(end))


def _of_itself(cls: Class, starts: Sequence[Function], ends: Ends) -> Iterator[tuple[Half, list[Half]]]:
    """The object is one: from `begin()` on, or as soon as it is made."""
    back = [Half(each, RELEASING, Handle.RECEIVER) for each in ends.such(needs_nothing)]
    made = not starts and not CALLED.isdisjoint(split(cls.name))
    begins = cls.methods.get("__init__") if made else next(filter(needs_nothing, starts), None)
    if not back or begins is None or "__del__" in cls.methods or _keeps_a_lease(begins):
        return
    handle = Handle.RESULT if made else Handle.RECEIVER
    yield Half(begins, ACQUIRING, handle, by_shape=True, echo=not made and returns_itself(begins)), back


def _keeps_a_lease(begins: Function) -> bool:
    """`self.conn = self.pool.checkout()`: it is that which is owed, and either end may forget it."""
    values = [
        value.value if isinstance(value, ast.Await) else value
        for target, value in assignments(begins)
        if isinstance(target, ast.expr) and own_attribute(target, begins.owner or "") is not None
    ]
    asked = [last_part(each.func) for each in values if isinstance(each, ast.Call)]
    return any(take_apart(name, ACQUIRE_WORDS) is not None for name in asked)
