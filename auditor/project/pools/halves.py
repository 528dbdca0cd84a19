"""The halves of a pair: what says that a method acquires, how, and what it hands out."""

import ast
from dataclasses import dataclass, replace

from auditor.flow.effects import Handle, Position, Value
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Class, Function
from auditor.project.pools.bodies import (
    ends_when_it_is_done,
    given_back_itself,
    keeps_what_it_is_told,
    kept_under_parameter,
    lends,
    piles_up_what_it_is_told,
    returns_itself,
    returns_several,
    returns_something,
    shared_key,
    told_nothing,
)
from auditor.project.pools.delegating import hands_on
from auditor.project.pools.lent_kinds import value_of
from auditor.project.pools.locks_within import locks_through
from auditor.project.pools.queues import PASSING_ON, POOL_WORDS
from auditor.project.pools.used_together import is_told_what_it_makes
from auditor.project.shapes.amounts import (
    amount_beside_a_name,
    returns_the_amount,
    returns_what_it_adds,
    takes_an_amount,
)
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.full_at_first import takes_work
from auditor.project.shapes.marked_places import finds_a_place
from auditor.project.shapes.pool_state import called, changes_state, own_parameters, removes_from_state
from auditor.project.shapes.reference_counts import (
    counts_references,
    counts_through,
    counts_what_it_returns,
    hands_out_a_key,
    returns_the_same,
    returns_what_it_is_told,
)
from auditor.project.shapes.under_keys import answers_what_lies_there
from auditor.project.shapes.use_counts import lowered_by, returns_the_count, struck_off_by_its_answer
from auditor.project.shapes.use_flags import marks_an_entry, marks_itself
from auditor.protocols.vocabulary import ACQUIRE_WORDS, COUNTING, WEAK, Name, split
from auditor.source.nodes import is_docstring

STRONG = ACQUIRE_WORDS - WEAK

LENDING = frozenset({"contextmanager", "asynccontextmanager", "property", "cached_property"})
"""Decorators of what gives back by itself, and of what is no call."""


@dataclass(frozen=True, slots=True)
class Half:
    """A method that acquires or releases, and how; `by_shape` where its name did not say so, `echo` where it
    returns what it was told, or the object itself: `pages = store.share(pages)`, `node = node.lock()`;
    `by_key` where it returns what lies under the key that its end is told; `part` which of those that it
    returns the lease is: of `node, used = tree.match(key)` the first."""

    function: Function
    name: Name
    handle: Handle = Handle.RESULT
    argument: Position = 0
    value: Value = Value.OBJECT
    by_shape: bool = False
    echo: bool = False
    by_key: bool = False
    part: int | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """One discovered protocol: the pool it belongs to, its acquiring and its releasing functions. `proposed`
    where it is for those who use it to say whether it is one; `called` where what is handed out is the
    function that ends it."""

    name: str
    owner: Class | None
    acquires: tuple[Half, ...]
    releases: tuple[Half, ...]
    proposed: bool = False
    called: bool = False


def acquiring_half(
    function: Function, name: Name, partners: list[Function], *, shaped: bool = False
) -> Half | None:
    """None where the body does not behave like one; of `shaped` ones it is known that it does."""
    if {"contextmanager", "asynccontextmanager"} & set(function.decorators) or returns_several(function):
        return None
    if ends_when_it_is_done(function, partners):
        return None
    asked = asked_alone(function)
    if asked is not None and asked_alone(asked[0]) is None:
        inner = acquiring_half(asked[0], name, partners, shaped=shaped)
        told = _told_as(asked[1], asked[0], inner.argument) if inner is not None else ""
        if inner is not None and inner.handle is Handle.ARGUMENT and told in own_parameters(function):
            return replace(inner, function=function, argument=told)
        if (
            inner is not None
            and inner.handle is Handle.RESULT
            and any(map(piles_up_what_it_is_told, partners))
        ):
            return replace(inner, function=function)  # `take_like(x)`, and `put(x)` on the pile
    if "classmethod" in function.decorators and not any(map(own_parameters, partners)):
        return None  # `Frame.acquire()` and `frame.release()`: the objects end themselves
    if function.is_abstract:
        if only_passes(function) or name.verb in WEAK - COUNTING:
            return None
        shared = shared_key(function, partners)
        if shared is not None:
            return Half(function, name, Handle.ARGUMENT, shared, Value.OBJECT)
        handle = Handle.RECEIVER if name.verb in COUNTING else Handle.RESULT
        return Half(function, name, handle, 0, value_of(function))
    if (name.verb in COUNTING and not lends(function, partners)) or not returns_something(function):
        return marking_half(function, name, partners)
    if (lowered := lowered_by(function, partners)) and returns_the_count(function, lowered):
        return marking_half(function, name, partners)
    if (lowered and returns_the_amount(function)) or returns_what_it_adds(function, partners):
        return Half(function, name, Handle.RESULT, 0, Value.AMOUNT, echo=True)
    public = [partner for partner in partners if not partner.name.startswith("_")] or partners
    if name.verb == "acquire" and all(map(told_nothing, public)):
        return Half(function, name, Handle.RECEIVER, 0, Value.OBJECT)  # nothing is handed back but the object
    if not shaped and not hands_out(function, name, partners):
        return None
    keyed = kept_under_parameter(function)
    if keyed is None:
        keyed = shared_key(function, partners)
    by_another_key = any(
        hands_out_a_key(function, partner) or struck_off_by_its_answer(function, partner)
        for partner in partners
    )
    if keyed is not None and not (given_back_itself(function, partners) or by_another_key):
        return Half(function, name, Handle.ARGUMENT, keyed, _told_value(function))
    return Half(function, name, Handle.RESULT, 0, value_of(function))


def asked_alone(function: Function) -> tuple[Function, ast.Call] | None:
    """`return self.allocate_msg(data, more)`, and nothing else: what is owed is what that one says."""
    body = [each for each in function.body if not is_docstring(each)]
    match body:
        case [ast.Return(value=ast.Call() as call) | ast.Expr(value=ast.Call() as call)]:
            named = own_attribute(call.func, function.owner or "")
            methods = function.cls.methods if function.cls is not None else {}
            found = methods.get(named) if named is not None else None
            return (found, call) if found is not None and found is not function else None
    return None


def _told_as(call: ast.Call, asked: Function, position: Position) -> str:
    """The name that stands for this parameter of what is asked."""
    names = own_parameters(asked)
    name = names[position] if isinstance(position, int) and position < len(names) else position
    at = names.index(name) if name in names else len(names)
    given = [*call.args[at : at + 1], *(each.value for each in call.keywords if each.arg == name)]
    return given[0].id if given and isinstance(given[0], ast.Name) else ""


def _told_value(function: Function) -> Value:
    return Value.AMOUNT if takes_an_amount(function) else Value.OBJECT


def marking_half(function: Function, name: Name, partners: list[Function]) -> Half | None:
    """It marks an object that exists: its first argument, or the receiver (`acquire(block)`, `release()`)."""
    marks = changes_state(function) or counts_through(function, partners) or locks_through(function, partners)
    if not (marks or lowered_by(function, partners)):
        return None
    if name.verb not in COUNTING and lowered_by(function, partners):
        name = Name("incr", name.affix)  # `get_credit()`, `borrow_credit()`: one user more
    elif name.verb in ("get", "pop"):
        return None
    marks_argument = own_parameters(function) and any(own_parameters(partner) for partner in partners)
    if not marks_argument and keeps_what_it_is_told(function):
        return None  # `retain(event)`, `release_all()`: kept while the receiver lives, and owed by nobody
    if marks_argument and any(hands_out_a_key(function, partner) for partner in partners):
        return Half(function, name, Handle.RESULT, 0, Value.INDEX)
    if marks_argument and any(struck_off_by_its_answer(function, partner) for partner in partners):
        return Half(function, name, Handle.RESULT, 0, value_of(function))
    if (beside := amount_beside_a_name(function, partners)) is not None:
        return Half(function, name, Handle.ARGUMENT, beside, Value.AMOUNT)
    if marks_argument:
        converts = bool(name.kind) and not counts_references(function)  # `pin_memory(tensor)`
        echo = returns_the_same(function) or (not converts and returns_what_it_is_told(function))
        by_key = echo and answers_what_lies_there(function) and shared_key(function, partners) == 0
        return Half(function, name, Handle.ARGUMENT, 0, _told_value(function), echo=echo, by_key=by_key)
    handle = Handle.NONE if _of_module(function) else Handle.RECEIVER
    return Half(function, name, handle, 0, Value.OBJECT, echo=returns_itself(function))


def _of_module(function: Function) -> bool:
    """What it counts up, there is one of: `enter_section()`."""
    return function.cls is None and function.parent is None and not function.of_first


def is_called_a_pool(function: Function) -> bool:
    """By the name of its class; of others `pop` takes from an operand stack or an undo list."""
    return not POOL_WORDS.isdisjoint(split(function.cls.name if function.cls else ""))


def hands_out(function: Function, name: Name, partners: list[Function]) -> bool:
    of_class = {*split(function.cls.name if function.cls else "")}
    if (name.verb == "pop" or takes_work(function)) and not is_called_a_pool(function):
        return False  # an operand stack, an undo list; a job that is claimed may be released to be retried
    if name.verb in ("get", "fetch") and of_class & PASSING_ON:
        return False  # what one side puts in, the other gets to keep
    if name.verb in WEAK - COUNTING:
        return (
            (
                removes_from_state(function)
                and not (name.verb == "get" and _of_other_stores(function, partners))
            )
            or marks_an_entry(function, partners)
            or marks_itself(function, partners)
            or finds_a_place(function, partners)
            or hands_on(function, partners)
            or counts_what_it_returns(function, partners)
            or _lends_by_type(function, name, partners)
        )
    if removes_from_state(function) or counts_what_it_returns(function, partners):
        return True
    return any(map(changes_state, with_helpers([function]))) or any(
        not STRONG.isdisjoint(split(name)) for name in called(function)
    )


def _lends_by_type(function: Function, name: Name, partners: list[Function]) -> bool:
    """`take_rows(n) -> Rows | None`, and `return_rows(rows: Rows)`"""
    told = any(is_told_what_it_makes(function, partner) for partner in partners)
    told = told and not is_told_what_it_makes(function, function)
    return name.verb not in ("get", "fetch", "pop") and bool(name.affix) and told


def _of_other_stores(function: Function, partners: list[Function]) -> bool:
    """`get_next()` takes results out of one field, and `push(actor)` puts idle actors into another."""
    taken = {field for field, _ in field_work(function).taken}
    filled = {put.field for each in with_helpers(partners) for put in field_work(each).put}
    apart = bool(taken and filled) and taken.isdisjoint(filled)
    return apart and not any(f".{field}" in function.text for field in filled)  # `self._free = self._dirty`


def with_helpers(methods: list[Function]) -> list[Function]:
    """Those, and what they ask of their own object."""
    asked = [
        method.cls.methods.get(own_attribute(call.func, method.owner or "") or "")
        for method in methods
        if method.cls is not None
        for call in method.calls
    ]
    return [*methods, *(each for each in asked if each is not None)]


def only_passes(function: Function) -> bool:
    """A body of `pass` that nobody declared abstract does nothing."""
    body = function.node.body if isinstance(function.node.body, list) else []
    return "abstractmethod" not in function.decorators and all(
        isinstance(statement, ast.Pass) for statement in body if not is_docstring(statement)
    )
