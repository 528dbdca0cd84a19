"""What a function gets out of a queue and gives back to a pool: on its other ways it owes that, too.

Nobody says so but the function itself, by giving back what it got (the belief of Engler et al., "Bugs as
Deviant Behavior", SOSP 2001). `item = self.inbox.get()`, or what a method hands on that gets it:
`item = self.take()`."""

import ast
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from auditor.flow.effects import Handle, Value
from auditor.flow.lease import EXCEPTIONAL, Loss
from auditor.ir.ops import Path
from auditor.project.code.bindings import (
    assigned_by,
    awaited,
    given_to,
    root_of,
    ways,
)
from auditor.project.code.modules import Function
from auditor.project.leases.given_back import (
    ended_records,
    given_back_in,
    handing_to,
    lends,
    own_given_back,
)
from auditor.project.leases.kept_and_ended import is_ended_where_kept
from auditor.project.leases.kinds_of_messages import says_what_it_is
from auditor.project.leases.wrapping import lists_what_it_counts
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import functions_with
from auditor.project.meaning.source import Source
from auditor.project.outcome import Outcome
from auditor.project.pools.halves import Pair
from auditor.project.shapes.field_work import field_work
from auditor.source.nodes import walk

QUEUED = frozenset({"get", "get_nowait", "popleft", "recv"})
"""Methods that take the next thing out, whichever it is."""

MANY = 4
"""Receivers who all forget the same are not mistaken."""

DEEPEST = 3
"""So many names one after the other are looked through."""

EACH: Path = ("[*]",)

FROM_QUEUES = frozenset({"get", "get_nowait"})


def second_hands(recogniser: Recogniser) -> Iterator[tuple[Function, ast.Call, Source]]:
    """Calls that take a lease out of a queue, with the functions that they stand in."""
    ends = [function for function, (pair, _) in recogniser.releasing.items() if lends(pair)]
    ends += [method for end in ends for method in handing_to(end)]
    words = {function.name for function in ends}
    modules = [
        module
        for module in recogniser.calls.model.project.parsed()
        if any(f".{way}(" in module.text for way in QUEUED)
    ]
    ending = {
        function: fields
        for module in modules
        for function, calls in functions_with(module, words)
        if (fields := list(own_given_back(recogniser, function, calls)))
    }
    for module in modules:
        for function, calls in functions_with(module, words | {method.name for method in ending}):
            back = [
                *given_back_in(recogniser, function, calls),
                *ended_records(recogniser, function, ending),
            ]
            for thing, pair in back:
                for taker, call, source in _got(recogniser, function, thing, pair):
                    yield taker, call, source
                    if not thing[1:]:  # of what a request holds, another method may know better
                        yield from ((each, other, source) for each, other in _others(taker, call))


def _others(taker: Function, call: ast.Call) -> Iterator[tuple[Function, ast.Call]]:
    """The same is in the queue for the other methods of the object."""
    queue = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    own = taker.cls is not None and queue.startswith(f"{taker.owner}.")
    for method in taker.cls.methods.values() if own and taker.cls is not None else ():
        for other in method.calls:
            same = isinstance(other.func, ast.Attribute) and ast.unparse(other.func.value) == queue
            if same and other is not call and _takes_from_others(method, other):
                yield method, other


def moves_things(pair: Pair) -> bool:
    """Whether the pair's methods take out of a store, and put back into the same one."""
    taken = {name for half in pair.acquires for name, _ in field_work(half.function).taken}
    return any(put.field in taken for half in pair.releases for put in field_work(half.function).put)


def without_exceptional(outcome: Outcome) -> Outcome:
    """That whatever call fails gives back what others have queued is seldom meant."""
    leaks = tuple(leak for leak in outcome.lease.leaks if leak.loss not in EXCEPTIONAL)
    return replace(outcome, lease=replace(outcome.lease, leaks=leaks))


def of_a_proposed_pair(outcome: Outcome, *, closing: bool, moved: bool) -> Outcome:
    """The same of what nobody is sure to lend, but where another acquire fails for want, and where a
    generator is `closing`, as long as nobody knows of who breaks it off. What is `moved` out of a store and
    back is lent, whatever the methods are called: of that the function's own `raise` is told, too."""
    leaks = tuple(
        leak
        for leak in outcome.lease.leaks
        if leak.loss not in EXCEPTIONAL
        or (leak.loss is Loss.RAISE and (moved or leak.failed is not None))
        or (leak.loss is Loss.CLOSE and closing)
    )
    return replace(outcome, lease=replace(outcome.lease, leaks=leaks))


def believe_receivers(
    outcomes: Mapping[int, Outcome],
    received: Mapping[Function, Sequence[Outcome]],
    recogniser: Recogniser,
    handed_on: Set[Function] = frozenset(),
) -> None:
    """Who is owed for what a list counts, or for what comes out of a container by one of the methods
    `handed_on`, its receivers say: where none of them gives it back, or keeps it where his class gives it
    back, nobody. So it is where many are handed one user more of something, and none
    of them cares: it is lost with all of them, not kept or handed on by any."""
    for method in handed_on:
        entries = received.get(method, ())
        caring = any(each.lease.released or is_ended_where_kept(recogniser, each) for each in entries)
        for each in entries if not caring else ():
            for known in (each, outcomes[id(each.call)]):
                known.lease = replace(known.lease, leaks=())
    for outcome in list(outcomes.values()):
        wrapper = recogniser.wrappers.get(outcome.function)
        listed = wrapper is not None and wrapper.second_hand and lists_what_it_counts(outcome)
        got = received.get(outcome.function, ()) if wrapper is not None else ()
        many = outcome.acquisition.counts and len(got) >= MANY
        cared_for = any(each.lease.released or (many and each.lease.handed_over) for each in got)
        if (
            (listed or many)
            and not cared_for
            and not any(is_ended_where_kept(recogniser, each) for each in got)
        ):
            for each in (*got, *(outcomes[id(other.call)] for other in got)):
                each.lease = replace(each.lease, leaks=())


def _got(
    recogniser: Recogniser, function: Function, thing: Path, pair: Pair
) -> Iterator[tuple[Function, ast.Call, Source]]:
    if (bound := _bound(function, thing)) is None:
        return
    value, rest = bound
    for call in ways(value):
        if not isinstance(call, ast.Call):
            continue
        source = handed_over(pair, rest)
        known, around = recogniser.calls.targets(function, call)[0], bool(thing[1:])
        queued = _takes_from_others(function, call, around=around) or _takes_from_its(function, call)
        if queued and not (known and around):  # a manager of sessions is asked to `get()` one
            yield function, call, source
        sure = not recogniser.calls.guessed(function, call)
        for target in known:
            for inner in _handed_on(target) if sure or target.cls is function.cls else ():
                yield target, inner, source
            for inner in _listed(target) if sure and rest[:1] == EACH else ():
                yield target, inner, handed_over(pair, rest[1:])


def _bound(function: Function, thing: Path) -> tuple[ast.expr, Path] | None:
    """The only value that the name is bound to, and where in it the thing lies. `arena, n = item` leads to
    what `item` is."""
    for _ in range(DEEPEST):
        bound = list(_bindings(function, thing[0]))
        if len(bound) != 1 or _told_apart(function, thing[0]):
            return None
        value, rest = bound[0]
        if rest and says_what_it_is(function, thing[0], value):
            return None
        thing = ("", *rest, *thing[1:])
        if not (rest and isinstance(value, ast.Name)) or value.id in function.parameters:
            return value, thing[1:]
        thing = (value.id, *thing[1:])
    return None


def handed_over(pair: Pair, rest: Path) -> Source:
    half = next(half for half in pair.acquires if half.handle is Handle.RESULT)
    value = Value.OBJECT if half.value is Value.AMOUNT else half.value
    return Source(
        pair.name, "discovered", Handle.RESULT, value, rest=rest, fresh=bool(rest), second_hand=True
    )


def _bindings(function: Function, name: str) -> Iterator[tuple[ast.expr, Path]]:
    """What is bound to the name, and where in that it lies."""
    for node in function.statements:
        for target, value in assigned_by(node):
            match target:
                case ast.Name(id=same) if same == name:
                    yield value, ()
                case ast.Tuple(elts=parts):
                    for index, part in enumerate(parts):
                        if isinstance(part, ast.Name) and part.id == name:
                            yield value, (f"[{index}]",)
        match node:
            case ast.For(target=ast.Name(id=same), iter=ast.Name() as listed) if same == name:
                yield listed, EACH
            case ast.For() | ast.AsyncFor() | ast.With() | ast.AsyncWith() if _binds(node, name):
                yield ast.Constant(None), ()


def _binds(node: ast.For | ast.AsyncFor | ast.With | ast.AsyncWith, name: str) -> bool:
    bound = (
        [node.target]
        if isinstance(node, (ast.For, ast.AsyncFor))
        else [item.optional_vars for item in node.items if item.optional_vars is not None]
    )
    return any(isinstance(each, ast.Name) and each.id == name for part in bound for each in walk(part))


def _told_apart(function: Function, name: str) -> bool:
    """`if item is STOP:`, `isinstance(item, Stop)`: not everything in the queue is a lease."""
    for node in function.nodes:
        match node:
            case ast.Compare(left=ast.Name(id=left), comparators=[right]) if left == name:
                if not (isinstance(right, ast.Constant) and right.value is None):
                    return True
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=left), _]) if left == name:
                return True
    return False


def _takes_from_others(function: Function, call: ast.Call, *, around: bool = False) -> bool:
    """The queue is told to the function or to its object; or what lies in it is `around` the lease."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in QUEUED or not _asks_for_next(call):
        return False
    match call.func.value:
        case ast.Attribute(value=ast.Name(id=owner), attr=field) if owner == function.owner:
            return (around and call.func.attr in FROM_QUEUES) or not _fills(function, field)
        case ast.Name(id=name):
            return name in function.parameters
    return False


def _takes_from_its(function: Function, call: ast.Call) -> bool:
    """`self.prefetcher.out.get()`, or `stager.out.get()` of what it is told: a queue that another object
    has."""
    match call.func:
        case ast.Attribute(value=ast.Attribute(value=ast.Attribute(value=ast.Name(id=owner))), attr=way) if (
            owner == function.owner
        ):
            return way in FROM_QUEUES and _asks_for_next(call)
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name)), attr=way) if name != function.owner:
            return name in function.parameters and way in FROM_QUEUES and _asks_for_next(call)
    return False


def _fills(function: Function, field: str) -> bool:
    """What its own methods put there is followed from where they put it."""
    methods = function.cls.methods.values() if function.cls is not None else ()
    return any(put.field == field for each in methods for put in field_work(each).put)


def _asks_for_next(call: ast.Call) -> bool:
    """`table.get(key)` looks something up."""
    return all(isinstance(each, ast.Constant) and isinstance(each.value, bool) for each in call.args[:1])


def _handed_on(target: Function) -> Iterator[ast.Call]:
    """`return self.inbox.get(timeout=1)`, or `return self.early.pop(index)` of what came out of a queue; also
    `item = self.inbox.get()`, and `return item`."""
    for node in target.statements:
        if isinstance(node, ast.Return) and node.value is not None:
            named = isinstance(node.value, ast.Name)
            given = given_to(target, node.value.id) if isinstance(node.value, ast.Name) else [node.value]
            for way in (way for value in given for way in ways(value)):
                if isinstance(way, ast.Call) and (
                    _takes_from_others(target, way) or (not named and _takes_what_was_queued(target, way))
                ):
                    yield way


def _listed(target: Function) -> Iterator[ast.Call]:
    """`rows.append(self.arena.full.get())`, and `return rows`."""
    returned = {
        node.value.id
        for node in target.statements
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    for call in target.calls:
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[added]) if (
                name in returned
            ):
                way = awaited(added)
                if isinstance(way, ast.Call) and (
                    _takes_from_others(target, way) or _takes_from_its(target, way)
                ):
                    yield way


def _takes_what_was_queued(function: Function, call: ast.Call) -> bool:
    """Out of a table of its object, into which all came from a queue: `self.early[reply.at] = reply.slot`."""
    match call.func:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id=owner), attr=field), attr="pop") if (
            owner == function.owner
        ):
            methods = function.cls.methods.values() if function.cls is not None else ()
            put = [
                (each, put.value) for each in methods for put in field_work(each).put if put.field == field
            ]
            return bool(put) and all(_came_from_a_queue(method, value) for method, value in put)
    return False


def _came_from_a_queue(method: Function, value: ast.expr) -> bool:
    given = list(given_to(method, root_of(value)))
    return bool(given) and all(
        isinstance(each := awaited(way), ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr in QUEUED
        and _asks_for_next(each)
        for value in given
        for way in ways(value)
    )
