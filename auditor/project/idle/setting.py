"""What the way of one taken object depends on: which calls only ask about it, which names may hold it."""

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator, Set
from functools import cached_property

from auditor.ir.calls import LOGGING, is_quiet
from auditor.ir.ops import Assume, Call, InPlace, Next, Path, Store
from auditor.project.code.bindings import assignments, given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.idle.alone import ENDING_THE_POOL
from auditor.project.idle.counted import counted_field
from auditor.project.idle.prepared import preparing
from auditor.project.idle.reasons import BOOKS, WORN, whole_tests
from auditor.project.idle.rotation import clears, is_gone_through_once, strikes_off
from auditor.project.idle.stock import Stock
from auditor.project.idle.supply import is_empty
from auditor.project.idle.takes import Take
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.full_at_first import INITIAL
from auditor.project.shapes.name_bindings import FILLING, bound_by
from auditor.project.shapes.pool_state import changes_state
from auditor.protocols.vocabulary import split
from auditor.source.nodes import blocks_of, walk

GONE = frozenset({"dropped", "drops", "discarded", "discards", "evicted", "evictions", "scrapped", "thrown",
                  "made", "created", "live", "lost", "out", "size", "total", "left"})  # fmt: skip
"""Words of counters that tell how many there are, or that are no more."""

PURE = frozenset({"len", "int", "float", "bool", "isinstance", "abs", "min", "max", "any", "all", "sum",
                  "str", "repr", "hasattr", "id", "type", "numel", "size", "element_size", "dim", "nelement",
                  "item", "isnan", "isfinite", "isinf", "equal", "query", "count_nonzero", "divmod", "hash",
                  "tuple"})  # fmt: skip
"""Functions, and methods of tensors and events, that keep nothing of what they are given."""

ON_PATHS = frozenset({"join", "exists", "lexists", "isfile", "isdir", "basename", "dirname"})
"""Functions of `os.path`: a name made of it, and whether there is something."""

ASKING = re.compile(
    r"_*(?:is|has|can|fits?|should|check|suits?|matches|needs|contains|covers|connect_ex|ping|probe|verify"
    r"|validate|test)(?:_|$)|_*isn?(?=[A-Z])"
    r"|_*(?:\w+_)?(?:ready|expired|stale|due|alive|healthy|[a-z]+able|eligible|too_\w+)$"
)
READING = frozenset({"values", "items", "keys", "get", "count", "copy"})
ORDERING = frozenset({"sort", "reverse", "shuffle", "heapify", "rotate"})
"""Ways to change the order of what lies in a store: what was taken out of it is not among that."""

WAKING = frozenset({"notify", "notify_all", "acquire", "release", "locked", "wait"})
ENDING_IT = re.compile(
    r"close|stop|shut|releas|free|finish|termin|exit|destroy|dispos|kill|cancel|evict|reset|delet|put"
)
CLOSING = re.compile(r"a?close(?:_\w+)?|terminate|shut(?:_?down)?|disconnect|kill|destroy")


def _lowers_before(function: Function, fields: Set[str], line: int) -> bool:
    """Or writes them so otherwise than by `self.made += 1`, which says that there is one more; what comes
    behind, is on the ways that come by it."""
    own = function.owner or ""
    written: list[ast.expr]
    for node in function.statements:
        match node:
            case ast.AugAssign(op=ast.Add()):
                continue
            case ast.AugAssign(target=target):
                written = [target]
            case ast.Assign(targets=targets, value=value):
                raised = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
                written = [] if raised else targets
            case _:
                continue
        if node.lineno < line and any(counted_field(each, own) in fields for each in written):
            return True
    return False


class TakenHere:
    """One take in one method; answers `flow.untouched.Setting`."""

    def __init__(self, store: Stock, function: Function, take: Take, takes: list[Take]) -> None:
        self.store = store
        self.function = function
        self.take = take
        self.own = function.owner or ""
        self._tops = {each.top for each in takes} - {None}
        self.stock = frozenset(f".{field}" for field in (*store.fields, *store.counters, *self._tops))
        self._takes = {id(each.at) for each in takes}

    def counts_another(self, op: InPlace) -> bool:
        """`self._made += 1`: one more is made, and this one is still counted."""
        counter = any(piece.lstrip(".") in self.store.counters for piece in op.target[1:])
        return counter and isinstance(op.at, ast.AugAssign) and isinstance(op.at.op, ast.Add)

    @cached_property
    def is_dropped_uncounted(self) -> bool:
        """Whether the method leaves the count of what there is alone where other methods, which drop one,
        count it down: `self.made -= 1`."""
        return (
            not ENDING_THE_POOL.fullmatch(self.function.name)
            and not _lowers_before(self.function, self.store.counters, self.take.shown.lineno)
            and self._is_counted_down
        )

    @property
    def is_never_counted_down(self) -> bool:
        """Whether what was made counts for good: a thing that is of no use any more has its place, too."""
        return bool(self.store.counters) and not self._is_counted_down

    @cached_property
    def _is_counted_down(self) -> bool:
        return any(
            field in self.store.counters and way < 0
            for work in self.store.works
            for field, way in (*work.counted, *((name, way) for name, way, _, _ in work.balances))
        )

    def says_nothing(self, op: InPlace | Store) -> bool:
        """Also `self.dirty[page] = False` of what its methods note of those that come back, and
        `page.refs = 1` or `self.refs[page] = 1` of one that is about to be lent."""
        if id(op.at) in self._preparing:
            return True
        if isinstance(op, InPlace):
            return self.counts_another(op) or self._moves_a_top(op.at) or self._only_counts(op.at)
        if self._counts_its_first_user(op.at) or self._empties_it(op.at):
            return True
        place = getattr(op.at, "slice", None)
        marked = (mark for mark in field_work(self.function).marked if mark.place is place)
        return any(mark.field in self.store.idle_marks and not mark.on for mark in marked)

    @cached_property
    def _preparing(self) -> frozenset[int]:
        return frozenset().union(*(preparing(self.function, name) for (name,) in self._named))

    @cached_property
    def is_rotation(self) -> bool:
        """Whether the store is gone through once, from its beginning to its end."""
        return is_gone_through_once(self.loops, self.take.shown, self.own)

    def renews_store(self, op: Store) -> bool:
        """`self.free = kept`"""
        return len(op.target) == 2 and op.target[1].lstrip(".") in self.store.fields

    def leaves_it(self, op: Call | Store, places: Set[Path]) -> bool:
        if not self.is_rotation:
            return False
        if isinstance(op, Call):
            return strikes_off(op, self.own, places)
        return clears(self.function, op, places)

    def _moves_a_top(self, at: ast.AST) -> bool:
        """`self.top -= 1`, by which the next one is taken off the pile."""
        match at:
            case ast.AugAssign(target=ast.Attribute(attr=name), op=ast.Sub()):
                return name in self._tops
        return False

    def _only_counts(self, at: ast.AST) -> bool:
        """`self.fallbacks += 1`, which nothing asks; `self.retired += 1` tells that it is gone for good, but
        for one that has to be ended."""
        match at:
            case ast.AugAssign(target=ast.Attribute(attr=name), op=ast.Add(), value=ast.Constant()):
                asked = any(
                    isinstance(node, ast.Compare) and name in ast.unparse(node)
                    for method in self.store.cls.methods.values()
                    for node in method.nodes
                )
                return not asked and (self.store.ends or (BOOKS | WORN | GONE).isdisjoint(split(name)))
        return False

    def _empties_it(self, at: ast.AST) -> bool:
        """`buffer.memory = None`: it is nobody's for that."""
        match at:
            case ast.Attribute(value=ast.Name(id=name)) if (name,) in self._named:
                return any(
                    node.targets == [at] and isinstance(node.value, ast.Constant) and node.value.value is None
                    for node in self.function.of_kind(ast.Assign)
                )
        return False

    def _counts_its_first_user(self, at: ast.AST) -> bool:
        return any(
            isinstance(node, ast.Assign)
            and node.targets == [at]
            and isinstance(node.value, ast.Constant)
            and node.value.value == 1
            and self._is_of_one(at)
            for node in self.function.statements
        )

    def _is_of_one(self, at: ast.AST) -> bool:
        """`page.refs`, `self.refs[page]`"""
        match at:
            case ast.Attribute(value=ast.Name(id=name)):
                return name != self.own
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id=owner)), slice=ast.Name(id=name)):
                given = list(given_to(self.function, name))
                taken = any(self.take.shown in walk(value) for value in given)
                return owner == self.own and (name == self.take.name or taken)
        return False

    def may_fail(self, call: Call) -> bool:
        """In a `try` that begins after the take, whose failure a handler is for."""
        method = next((w.method for w in self.store.works if w.method.name == call.method), None)
        keeps = method is not None and call.receiver == (self.own,) and changes_state(method)
        tried = (part for guard in self.guards for body in guard.body for part in walk(body))
        return not keeps and not CLOSING.fullmatch(call.method) and any(part is call.at for part in tried)

    @cached_property
    def guards(self) -> list[ast.Try]:
        """Each `try` that begins after the take."""
        tries = (node for node in self.function.statements if isinstance(node, ast.Try))
        return [node for node in tries if node.handlers and node.lineno > self.take.shown.lineno]

    def takes(self, call: Call) -> bool:
        return id(call.at) in self._takes

    def only_asks(self, call: Call, given: bool) -> bool:
        name, receiver = call.method, call.receiver
        if id(call.at) in self._preparing and not CLOSING.fullmatch(name):
            return True
        if (name in LOGGING and is_quiet(call.at)) or (name == "print" and receiver is None):
            return True
        if receiver is not None and receiver[0] == self.own:
            of_others = self._is_of_others(call) or self._is_told(call) or self._goes_back(call)
            return (not given and (of_others or name in READING | ORDERING)) or self._asks_itself(call)
        if name in ORDERING and not given:
            return True
        on_paths = name in ON_PATHS and receiver is not None and receiver[-1].lstrip(".@") == "path"
        if name in PURE or on_paths or self._complains(call.at):
            return True
        if self.store.counters and not call.args and CLOSING.fullmatch(name):
            return True  # it is closed, and its place is not given back by that
        if id(call.at) not in self.tests:
            return False
        by_caller = receiver is None and name in self.function.parameters
        return not given or by_caller or ASKING.match(name) is not None or self._asks_it(call)

    def is_an_answer(self, at: ast.AST) -> bool:
        """`pong = await conn.request("ping")`: what has to be ended has answered, and is open as before."""
        value = at.value if isinstance(at, ast.Assign | ast.Expr) else at
        if not self.store.ends:
            return False
        match value.value if isinstance(value, ast.Await) else value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=way), args=args):
                told = any(
                    isinstance(node, ast.Name) and (node.id,) in self._named
                    for arg in args
                    for node in walk(arg)
                )
                return (name,) in self._named and not told and not ENDING_IT.search(way)
        return False

    @cached_property
    def answers(self) -> set[str]:
        """The local names of such answers."""
        statements = (each for each in self.function.statements if isinstance(each, ast.Assign))
        given = (to for each in statements if self.is_an_answer(each) for to in each.targets)
        return {to.id for to in given if isinstance(to, ast.Name)}

    @cached_property
    def _named(self) -> set[Path]:
        """The local name of what is taken."""
        given = ((to.id, value) for to, value in assignments(self.function) if isinstance(to, ast.Name))
        return {(name,) for name, value in given if any(part is self.take.shown for part in walk(value))}

    def _complains(self, call: ast.Call) -> bool:
        """`raise ValueError(f"{page} is not aligned")`: a text about it."""
        raised = any(isinstance(node, ast.Raise) and node.exc is call for node in self.function.statements)
        return raised and all(isinstance(arg, (ast.JoinedStr, ast.Constant, ast.BinOp)) for arg in call.args)

    def _asks_itself(self, call: Call) -> bool:
        path = call.receiver or ()
        if len(path) > 1:
            on_memory = path[1].lstrip(".") in self.store.memory  # `self.rows[row].zero_()`
            return on_memory or call.method in WAKING or id(call.at) in self.tests
        method = next((w.method for w in self.store.works if w.method.name == call.method), None)
        return method is not None and id(call.at) in self.tests and not changes_state(method)

    def _is_of_others(self, call: Call) -> bool:
        """`self.source.fetch(name)`, which has neither the object nor what was taken."""
        path = call.receiver or ()
        told = [*(place for place, _ in call.args), *(place for _, place in call.kwargs)]
        field = path[1].lstrip(".") if len(path) > 1 else ""
        work = field_work(self.function)
        worked = {name for name, _ in (*work.taken, *work.removed, *work.counted)} | {
            put.field for put in work.put
        }
        return (
            bool(field)
            and field not in self.store.fields | self.store.counters | worked
            and (all(place[0] != self.own or len(place) > 1 for place in told))
        )

    def _goes_back(self, call: Call) -> bool:
        """`self._free.extend(picked)`: others go back."""
        path = call.receiver or ()
        return len(path) == 2 and path[1].lstrip(".") in self.store.fields and call.method in FILLING

    def _is_told(self, call: Call) -> bool:
        """`self._start()` of a function that the constructor was told: it knows nothing of the object."""
        told = [*(place for place, _ in call.args), *(place for _, place in call.kwargs)]
        return (
            call.receiver == (self.own,)
            and f".{call.method}" in self._given
            and not any(place == (self.own,) for place in told)
        )

    def _asks_it(self, call: Call) -> bool:
        """`worker.ping()`, `buffer[:64].any()` in a condition: of the thing, which nobody else is given."""
        return call.receiver is not None and not call.args and not ENDING_IT.search(call.method)

    @cached_property
    def tests(self) -> dict[int, ast.expr]:
        """By each of its parts a whole condition."""
        return whole_tests(self.function)

    def ends_it(self, call: Call) -> bool:
        """Not `self._free.put(slot)`."""
        path = call.receiver or ()
        stored = len(path) > 1 and path[0] == self.own and path[1].lstrip(".") in self.store.fields
        return not stored and ENDING_IT.search(call.method) is not None

    def asks_books(self, op: Assume) -> bool:
        """Not how many there are in the stock, or what the object was told once and for all."""
        own = (own_attribute(node, self.own) for node in walk(op.at) if isinstance(node, ast.expr))
        fields = {f".{name}" for name in own if name is not None}
        known = self.stock & op.names or (fields and fields <= self._given)
        return self.own in op.names and not known

    @cached_property
    def _given(self) -> frozenset[str]:
        """`.limit` of `self.limit = limit` in the constructor, which nothing changes."""
        own = self.store.cls.methods.values()
        written = Counter(
            f".{node.attr}"
            for method in own
            for node in method.nodes
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        )
        told = {
            f".{target.attr}"
            for method in own
            if method.name in INITIAL
            for target, value in assignments(method)
            if isinstance(target, ast.Attribute) and isinstance(value, ast.Name)
        }
        return frozenset(name for name in told if written[name] == 1)

    def branches_at(self, op: Assume) -> bool:
        return id(self.tests.get(id(op.at))) in self._branching

    def is_asked(self, at: ast.AST) -> bool:
        return id(at) in self.tests

    @cached_property
    def _branching(self) -> set[int]:
        return {id(node.test) for node in self.function.nodes if isinstance(node, (ast.If, ast.IfExp))}

    def is_box(self, name: str) -> bool:
        given = [each for each in given_to(self.function, name) if not self._is_begun_with_it(each)]
        return bool(given) and all(map(is_empty, given)) and not self.mentioned_before(name)

    def _is_begun_with_it(self, value: ast.expr) -> bool:
        """`run = [page]`"""
        match value:
            case ast.List(elts=[ast.Name(id=name)]):
                return (name,) in self._named
        return False

    def mentioned_before(self, name: str) -> bool:
        """Whether anything but a condition, the head of a loop, or what asks for its length has to do with it
        before."""
        harmless = set(self.tests).union(
            id(part)
            for node in self.function.nodes
            if isinstance(node, (ast.For, ast.AsyncFor)) or _measures(node)
            for part in (walk(node.iter) if isinstance(node, (ast.For, ast.AsyncFor)) else walk(node))
        )
        line = getattr(self.take.at, "lineno", 0)
        return any(node.lineno < line and id(node) not in harmless for node in self._reads_of(name))

    def is_read_once_after(self, name: str, at: ast.AST) -> bool:
        since = getattr(at, "lineno", 0), getattr(at, "col_offset", 0)
        return sum((read.lineno, read.col_offset) > since for read in self._reads_of(name)) == 1

    def names_next(self, op: Next) -> bool:
        return any(
            isinstance(loop, (ast.For, ast.AsyncFor))
            and loop.target is op.at
            and self.take.name in bound_by(loop.target)
            for loop in self.loops
        )

    def stays_near(self, name: str) -> bool:
        if not self.loops:
            return True
        loop = max(self.loops, key=lambda node: node.lineno)
        inside = {id(node) for node in walk(loop)}
        another = self._named_anew_after(loop, name)
        return all(id(node) in inside or node.lineno > another for node in self._reads_of(name))

    def _named_anew_after(self, loop: ast.stmt, name: str) -> float:
        """The line from which on, behind the loop, it names another one: `conn = await self._dial()`."""
        holders = [*self.function.statements, self.function.node] if len(self.loops) == 1 else []
        bodies = (block for each in holders for block in blocks_of(each) if loop in block)
        for statement in (later for block in bodies for later in block[block.index(loop) + 1 :]):
            match statement:
                case ast.Assign(targets=[ast.Name(id=bound)], value=value) if bound == name:
                    read = any(isinstance(node, ast.Name) and node.id == name for node in walk(value))
                    return math.inf if read else statement.lineno
        return math.inf

    @cached_property
    def loops(self) -> list[ast.For | ast.While | ast.AsyncFor]:
        """The loops around it."""
        return [
            node
            for node in self.function.nodes
            if isinstance(node, (ast.For, ast.While, ast.AsyncFor))
            and any(inner is self.take.at for part in node.body for inner in walk(part))
        ]

    def _reads_of(self, name: str) -> list[ast.Name]:
        within = {id(node) for part in self._of_others(name) for node in walk(part)}
        return [
            node
            for node in self.function.nodes
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            if id(node) not in within
        ]

    def _of_others(self, name: str) -> Iterator[ast.AST]:
        """`any(page > n for page in pages)`, `for page in pages: self.free.append(page)`, where it names
        another."""
        made = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
        for node in self.function.nodes:
            if isinstance(node, made) and any(name in bound_by(each.target) for each in node.generators):
                yield node
            elif isinstance(node, ast.For) and name in bound_by(node.target) and node not in self.loops:
                yield from node.body


def _measures(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
