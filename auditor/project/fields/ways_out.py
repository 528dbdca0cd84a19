"""One way on which a method loses an entry of a container: what took it out, what is asked, who has it."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from auditor.flow.decisive import decisive
from auditor.flow.emptied_slots import emptied_slots
from auditor.flow.follow import Followed
from auditor.flow.held import Held
from auditor.flow.named_containers import named_containers
from auditor.flow.trace import Station, shortest_path
from auditor.ir.calls import LOGGING
from auditor.ir.ops import (
    ANY_ITEM,
    RAISING,
    Assume,
    Await,
    Call,
    Delete,
    Edge,
    Leave,
    Move,
    Next,
    Op,
    Path,
    Store,
)
from auditor.ir.tables import GOING_OVER, named_tables
from auditor.project.code.bindings import assignments, own_attribute, root_of
from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING, looks_releasing
from auditor.project.fields.in_others import PREDICATE
from auditor.project.fields.mere_looks import SUMMING
from auditor.project.meaning.outside_words import ON_STREAMS
from auditor.project.shapes.field_work import field_work
from auditor.source.nodes import walk

LOOPS = (ast.For, ast.AsyncFor, ast.While)
SAYING = frozenset({"print", "len", "bool", "repr", "str"})
READING = SAYING | {"bytes", "bytearray", "memoryview", "isinstance"}
"""Functions that take from what they are told a copy, or a yes or no."""
TAKING = frozenset(
    {"pop", "popleft", "popitem", "get", "get_nowait", "clear", "heappop", "remove", "discard"}
)
OUT_OF_HEAPS = frozenset({"heappop", "heappushpop", "heapreplace"})


OWNING = re.compile(r"(?:^|_)(?:own|owns|owned|owner|borrowed)(?:_|$)")

ANSWERING = frozenset({"cancel", "set_result", "set_exception"})
"""Methods of futures."""


def _before_ends(followed: Followed, ops: Sequence[Op]) -> set[int]:
    """What comes before an end of the entry in the same turn: whoever is told of it there has only borrowed
    it, or it could not be given back behind that."""
    pending = [(node, held) for node in followed.endings.released for held in followed.solution.states[node]]
    seen = set(pending)
    while pending:
        for node, held, edge in followed.solution.came_from.get(pending.pop(), ()):
            if edge not in RAISING and (node, held) not in seen and not isinstance(ops[node], Next):
                seen.add((node, held))
                pending.append((node, held))
    return {node for node, _ in seen} - followed.endings.released.keys()


def _compared(test: ast.AST) -> Iterator[tuple[str, str]]:
    match test:
        case ast.Compare(
            left=ast.Attribute(attr=attr), ops=[ast.Eq() | ast.Is()], comparators=[ast.Attribute() as found]
        ) if found.attr.isupper():
            yield attr, ast.unparse(found)


def _gone_over(over: ast.expr) -> str:
    """`self.rows` of `list(self.rows.values())`."""
    match over:
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=[inner]):
            return _gone_over(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="values"), args=[]):
            return _gone_over(inner)
    return ast.unparse(over)


class WayOut:
    """One way on which a method loses an entry of `container`, or of the table that one of its records has in
    the field `inner`, or of any of the lists that lie in it where that is `[*]`."""

    def __init__(
        self, method: Function, followed: Followed, node: int, held: Held, container: Path, inner: str = ""
    ) -> None:
        self.method = method
        self.followed = followed
        self.node = node
        self.held = held
        self.container = container
        self.inner = inner
        self.lists = _lists_in(method, container) if inner == ANY_ITEM else set[str]()
        self.ops = method.graph.ops
        self.emptied = {id(self.ops[each]) for each in emptied_slots(self.ops)}
        self.names = {place[0] for place in held.places} - set(_keys(method, container))
        self.itself = {place[0] for place in held.places if len(place) == 1}
        self.path: list[Station] = shortest_path(method.graph, followed.solution, node, held)
        nodes = [*(station.node for station in self.path), node]
        taking = [index for index, each in enumerate(nodes) if self._takes(self.ops[each])]
        if taking and self._takes_the_next(nodes[taking[-1]]):
            taking.pop()
        self.taken = self.ops[nodes[taking[-1]]].at if taking else None
        self.all_at_once = bool(taking) and isinstance(self.ops[nodes[taking[-1]]], Store)
        self.since = self.path[taking[-1] + 1 :] if taking else []
        self.in_hand = [*self.path[self._begins(taking[-1]) : taking[-1]], *self.since] if taking else []

    def _begins(self, taking: int) -> int:
        """Where the method has got it: `for job in self.jobs.values():` before `self.jobs.clear()`, and
        `stay = self.stays[plate]` before `del self.stays[plate]`."""
        for index in range(min(taking, len(self.path) - 1), -1, -1):
            op, edge = self.ops[self.path[index].node], self.path[index].edge
            if isinstance(op, Next) and edge is Edge.BODY and op.target[0] in self.names:
                return index + 1
            if isinstance(op, Move) and len(op.target) == 1 and op.target[0] in self.names:
                return index + 1
        return taking + 1

    def _takes(self, op: Op) -> bool:
        """Something out of the container, or the container itself."""
        match op:
            case Call(method=method, args=args, receiver=receiver):
                taken = args[0][0] if method in OUT_OF_HEAPS and args else receiver
                takes = method in TAKING | OUT_OF_HEAPS
                return takes and (taken == self.container or self._is_inner(taken))
            case Delete(target=(*table, _)) if self._is_inner(tuple(table)):
                return True
            case Store(target=target) if target[:2] == self.container and id(op) in self.emptied:
                return True
            case Delete(target=target) | Store(target=target):
                return target[:2] == self.container and (isinstance(op, Delete) or len(target) == 2)
        return False

    def _is_inner(self, table: Path | None) -> bool:
        """`self.machines[name].nics`, also by way of a local name; `self.idle[key]`, a list in the table."""
        if table is None:
            return False
        if self.inner == ANY_ITEM:
            return (table[:-1] == self.container and table[-1][0] == "[") or table[0] in self.lists
        return table[1:] != () and table[-1] == self.inner

    def _takes_the_next(self, call: int) -> bool:
        """`job = self.jobs.get()` in the next turn, where the one before has lost its name by that."""
        op = self.ops[self.node]
        source = op.source if isinstance(op, Move) else None
        for station in reversed(self.path):
            before = self.ops[station.node]
            if isinstance(before, Await) and before.target == source:
                source = before.source
            if station.node == call:
                return getattr(before, "target", None) == source
        return False

    def taken_again(self) -> ast.Call | None:
        """The call that takes it out, under a name, where other ways give it back or put it in again."""
        bound = [
            (target, each)
            for target, value in assignments(self.method)
            for each in walk(value)
            if each is self.taken and isinstance(each, ast.Call)
        ]
        if not bound:
            return None
        names = {node.id for node in walk(bound[0][0]) if isinstance(node, ast.Name)}
        work = field_work(self.method)
        kept = any(isinstance(put.value, ast.Name) and put.value.id in names for put in work.put)
        return bound[0][1] if kept or self.followed.endings.released else None

    def asked(self) -> frozenset[str]:
        """What the conditions ask that decide about it."""
        path = decisive(self.method.graph, self.followed.solution, self.path, [(self.node, self.held)])
        asked = [op.names for station in path if isinstance(op := self.ops[station.node], Assume)]
        return frozenset().union(*asked) - {self.container[1]}

    def found_in(self) -> Mapping[str, str]:
        """`Phase.ENCODING` for the `phase` of `if request.phase == Phase.ENCODING:`, which decides."""
        path = decisive(self.method.graph, self.followed.solution, self.path, [(self.node, self.held)])
        asked = [op for station in path if isinstance(op := self.ops[station.node], Assume) and op.value]
        return dict(told for op in asked for told in _compared(op.at))

    def is_worked_with(
        self,
        telling: Set[str],
        own: str,
        may_end: Callable[[ast.Call], bool],
        only_asks: Callable[[ast.Call], bool],
    ) -> bool:
        """A method of the entry may end what lies in it, and so may whoever is given the entry, or what was
        made of it: `self.put(self.slot_of(entry.offset))`; not `list(entry.tokens)`, which only tells, nor
        `pool.take(len(entry))`, nor `entry.future.cancel()` where nobody waits to end anything then; nor what
        is told other parts of it than its `own`, and ends no such lease by any name, or `pool.users(entry)`,
        which `only_asks`; nor who is told of it on all ways, where on another one it is given back behind
        that."""
        lent = _before_ends(self.followed, self.ops) - set(self._saying_yes())
        calls = (
            op
            for station in self.in_hand
            if isinstance(op := self.ops[station.node], Call) and station.node not in lent
        )
        nodes = [node for op in calls if op.method not in LOGGING | SAYING for node in walk(op.at)]
        only_tell = {
            id(each.value) for each in nodes if isinstance(each, ast.Attribute) and f".{each.attr}" in telling
        }
        only_tell |= {
            id(each.value)
            for each in nodes
            if isinstance(each, ast.Subscript) and f"[{ast.unparse(each.slice)}]" in telling
        }
        only_tell |= {id(each) for call in nodes for each in _read(call)}
        tables = named_tables(self.method.node)
        only_tell |= {id(each) for call in nodes for each in _asked_for_keys(call, tables)}
        only_tell |= {
            id(part)
            for call in nodes
            if isinstance(call, ast.Call) and not may_end(call)
            for part in (*_asked_for_parts(call, own), *_asked(call, self.itself))
        }
        only_tell |= {id(each) for call in nodes for each in _only_read(call)}
        only_tell |= {
            id(each) for call in nodes if isinstance(call, ast.Call) and only_asks(call) for each in call.args
        }
        if "add_done_callback" not in self.method.module.text:
            only_tell |= set(_answered(nodes))
        named = (each for each in nodes if isinstance(each, ast.Name) and id(each) not in only_tell)
        return any(each.id in self.names for each in named)

    def is_told_apart(self) -> bool:
        """`if message is STOP:`, `isinstance(job, Stop)`: not every entry holds a lease; `len(pages) > room`
        says nothing of that."""
        tests = (op.at for station in self.since if isinstance(op := self.ops[station.node], Assume))
        asked = [
            each
            for test in tests
            for node in walk(test)
            if isinstance(node, ast.Compare | ast.Call)
            and not (_asks_for_none(node) or _measures(node, test) or self._asks_another(node))
            for each in ast.iter_child_nodes(node)
        ]
        return any(isinstance(each, ast.Name) and each.id in self.names for each in asked)

    def _saying_yes(self) -> Iterator[int]:
        """`if sink.take(page): continue`: who answers so may have it."""
        assumed = (op for station in self.in_hand if isinstance(op := self.ops[station.node], Assume))
        yes = {op.subject for op in assumed if op.kind == "truth" and op.value}
        for station in self.in_hand:
            if isinstance(op := self.ops[station.node], Call) and op.target in yes:
                yield station.node

    def _asks_another(self, node: ast.expr) -> bool:
        """`sink.fill(page)`, which does something with it, and no `is_stop(page)`."""
        match node:
            case ast.Call(func=ast.Attribute(value=whom, attr=name)):
                return root_of(whom) not in (self.method.owner, "") and PREDICATE.match(name) is None
        return False

    def is_for_others(self, flags: Mapping[str, bool]) -> bool:
        """`if entry.owned: give(entry.buffer)`: on the other way goes what was not marked so, or what was
        told to be nobody's, of which more is said than that it goes."""
        assumed = (op for station in self.in_hand if isinstance(op := self.ops[station.node], Assume))
        asked = [
            (op.subject[-1][1:], not op.says_absent) if op.kind == "none" and op.subject else
            (op.key.rpartition(".")[2], op.value)
            for op in assumed
            if op.kind in ("truth", "going", "none")
        ]  # fmt: skip
        told = any(not says and flags.get(field) is says and OWNING.search(field) for field, says in asked)
        return told or any(flags.get(field, says) is not says for field, says in asked)

    def is_sure(self) -> bool:
        """Where the method also gives entries back, the same turn of the same loop decides which of them."""
        released = [self.ops[node].at for node in self.followed.endings.released]
        around = self._loop_around(self.taken)
        inside = {id(part) for part in walk(around)} if around is not None else set()
        if not released:
            return True
        named = any(place[0].isidentifier() for place in self.held.places)  # which entry this one is
        if self.all_at_once:
            return named  # `pending, self.pending = self.pending, []`: they are gone through, or are not
        return named and (
            any(
                id(at) in inside
                or (around is None and (self._loop_around(at) is None or self._goes_over_it(at)))
                for at in released
            )
            or (around is not None and self._is_gathered_in(around))
        )

    def is_put_over(self) -> bool:
        """`self.grants = grants`, of a list that has been filled here, and nobody has the one before: there
        may have been none in that."""
        if any(place[0] != self.container[0] for place in self.held.places):
            return False
        match self.taken:
            case ast.Attribute() as target:
                given = (value for each, value in assignments(self.method) if each is target)
                return any(isinstance(value, ast.Name) for value in given)
        return False

    def _goes_over_it(self, at: ast.AST) -> bool:
        """`for host in table: give(host)`, of a `table` that was taken out as a whole, or of the container
        before it is cleared; not `if host.pooled: give(host)` there, of those of which it is true."""
        loop = self._loop_around(at)
        if not isinstance(loop, ast.For):
            return False
        if getattr(loop.iter, "id", None) in self.names:
            return True
        assumed = (op for station in self.in_hand if isinstance(op := self.ops[station.node], Assume))
        marked = any(
            op.kind in ("truth", "going") and not op.value and len(op.subject or ()) > 1 for op in assumed
        )
        return not marked and _gone_over(loop.iter) == ".".join([self.container[0], self.container[1][1:]])

    def _is_gathered_in(self, loop: ast.AST) -> bool:
        """`batch.append((request, permit))` on the other ways of the turn, and a loop behind it gives those
        back."""
        return any(
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("append", "add")
            and isinstance(call.func.value, ast.Name)
            and any(isinstance(n, ast.Name) and n.id in self.names for each in call.args for n in walk(each))
            for call in walk(loop)
        )

    def is_another(self) -> bool:
        """What the method gives back is out of the container by then, and had no other name before, so that
        this one is none of those: `job = self.jobs.pop(rid)`, and `job.slot` is given back."""
        states, taking = self.followed.solution.states, map(self._takes, self.ops)
        before = (held for node, takes in enumerate(taking) if takes for held in states.get(node, ()))
        after = (held for node in self.followed.endings.released for held in states[node])
        return all(place[:2] == self.container for held in before for place in held.places) and all(
            place[:2] != self.container for held in after for place in held.places
        )

    def _loop_around(self, at: ast.AST | None) -> ast.AST | None:
        """The innermost one."""
        loops = [node for node in self.method.nodes if isinstance(node, LOOPS)]
        around = [loop for loop in loops if any(part is at for each in loop.body for part in walk(each))]
        return max(around, key=lambda loop: loop.lineno, default=None)


def _keys(method: Function, container: Path) -> Iterator[str]:
    """`key` of `for key in list(self.jobs): job = self.jobs.pop(key)`, and of `key, job =
    self.jobs.popitem()`, which is none of what lies there."""
    for node in method.nodes:
        match node:
            case ast.Subscript(value=table, slice=ast.Name(id=key)):
                pass
            case ast.Call(func=ast.Attribute(value=table, attr="pop" | "get"), args=[ast.Name(id=key), *_]):
                pass
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=key), _])],
                value=ast.Call(func=ast.Attribute(value=table, attr="popitem")),
            ):
                pass
            case _:
                continue
        if own_attribute(table, container[0]) == container[1][1:]:
            yield key


def _lists_in(method: Function, container: Path) -> set[str]:
    """`idle` of `idle = self.idle[key]` and `idle = self.idle.setdefault(key, [])`."""
    named = named_containers(method.graph.ops)
    return {name[0] for name, place in named.items() if place == (*container, ANY_ITEM)}


def _asks_for_none(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and any(
        isinstance(side, ast.Constant) and side.value is None for side in test.comparators
    )


def _measures(node: ast.AST, test: ast.AST) -> bool:
    """`len(pages)`, where that is not compared with a constant: of an empty one nothing is owed."""
    constant = any(
        isinstance(each, ast.Compare) and any(isinstance(side, ast.Constant) for side in each.comparators)
        for each in walk(test)
    )
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len" and not constant


def _read(call: ast.AST) -> Iterator[ast.AST]:
    """`slot` of `bytes(self.memory[slot])`; what calls in there are told is asked of those."""
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in READING):
        return
    nested = (part for part in walk(call) if isinstance(part, ast.Call) and part is not call)
    within = {id(part) for each in nested for part in walk(each)}
    yield from (part for part in walk(call) if id(part) not in within)


def _asked(call: ast.Call, itself: Set[str]) -> Iterator[ast.Name]:
    """`buffer` of `buffer.view()`, which is the lease itself, and of which no name says that it ends
    something."""
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name() as entry, attr=way)) if entry.id in itself:
            if ENDING.search(way) is None and not looks_releasing(call):
                yield entry


def _asked_for_keys(call: ast.AST, tables: Set[str]) -> Iterator[ast.Name]:
    """`members` of `sorted(members)`, which is a dict."""
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in GOING_OVER:
        yield from (each for each in call.args if isinstance(each, ast.Name) and each.id in tables)


def _asked_for_parts(call: ast.Call, own: str) -> Iterator[ast.Name]:
    """`entry` of `give(entry.page)` and `entry["graph"].reset()`, not of `give(entry)`."""
    nested = (part for part in walk(call) if isinstance(part, ast.Call) and part is not call)
    within = {id(part) for each in nested for part in walk(each)}
    for node in walk(call):
        match node:
            case ast.Attribute(value=ast.Name() as entry, attr=field) if node is not call.func:
                part = f".{field}"
            case ast.Subscript(value=ast.Name() as entry, slice=ast.Constant() as key):
                part = f"[{ast.unparse(key)}]"
            case _:
                continue
        if part != own and id(node) not in within:
            yield entry


def _only_read(call: ast.AST) -> Iterator[ast.AST]:
    """All of `sum(part.filled for part in parts)`, and `event` of `stream.wait_event(event)`."""
    match call:
        case ast.Call(
            func=ast.Name(id=made),
            args=[ast.GeneratorExp(elt=ast.Attribute(value=ast.Name() as part), generators=[over])],
        ) if made in SUMMING:
            if not over.ifs and isinstance(over.target, ast.Name) and part.id == over.target.id:
                yield from (part, over.target, over.iter)
        case ast.Call(func=ast.Attribute(attr=method), args=args) if method in ON_STREAMS:
            yield from args


def _answered(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """`entry` of `entry.future.cancel()`"""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name() as entry), attr=method)):
                if method in ANSWERING:
                    yield id(entry)


def goes_out_of_hand(method: Function, op: Op, held: Held) -> bool:
    """Only local names have it where the function is left, or where the only name means another record in the
    next turn. What a comprehension called it, it has no more."""
    names = {place[0] for place in held.places if "~" not in place[0]}
    local = bool(names) and all(name.isidentifier() and name not in method.parameters for name in names)
    return local and (isinstance(op, Leave) or (isinstance(op, Move) and {op.target[0]} == names))
