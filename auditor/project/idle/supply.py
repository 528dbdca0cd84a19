"""Whether a method adds to the stock of its class."""

import ast
import re
from collections.abc import Iterator, Set
from functools import cached_property

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Class, last_part
from auditor.project.pools.lent_objects import comes_back_when_dropped
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.full_at_first import AROUND, NUMBERING
from auditor.project.shapes.made_new import MAKERS, OF_ARRAYS, hands_out_new
from auditor.project.shapes.name_bindings import mentions
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

STARTING_OVER = re.compile(
    r"_*(?:re_?set|re_?init|clear|close|shutdown|flush|__(?:set|get)state__|load_state)"
)
"""Methods that fill a store anew, or empty it for good."""

JOINING = frozenset({"add", "register", "grow", "expand", "attach", "provision", "donate", "spawn", "join",
                     "enlarge", "increase", "refill", "replenish", "scale", "start", "install"})  # fmt: skip
"""Words in the names of methods by which something comes to the stock from elsewhere."""


def taken_ids(work: FieldWork, fields: Set[str]) -> set[int]:
    """The expressions that take out of these stores, with `self.pile[self.top]` beside `self.top -= 1`."""
    own = work.method.owner or ""
    down = {name for name, way in work.counted if way < 0}
    piled = {
        id(node)
        for node in (work.method.nodes if down else ())
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        if own_attribute(node.value, own) in fields and own_attribute(node.slice, own) in down
    }
    return piled | {id(node) for name, node in work.taken if name in fields}


def read_off(work: FieldWork, fields: Set[str]) -> set[int]:
    """The same, and those that read the stores."""
    own = work.method.owner or ""
    read = {id(node) for node in work.method.of_kind(ast.Attribute) if own_attribute(node, own) in fields}
    return read | taken_ids(work, fields)


def comes_back_by_itself(cls: Class, makers: Set[str]) -> bool:
    """A finaliser, or `__del__` of the things, puts back what is dropped."""
    made = (other for name, other in cls.module.classes.items() if name in makers)
    watched = any(map(comes_back_when_dropped, cls.methods.values()))
    return watched or any("__del__" in other.methods for other in made)


class Supply:
    """What one method does to the stock in `fields`, whose things `makers` make and the methods `lending`
    hand out. Where all of them are numbers, `numbered`, no object that is made is one of them."""

    def __init__(
        self,
        work: FieldWork,
        fields: Set[str],
        makers: Set[str],
        lending: Set[str],
        *,
        numbered: bool = False,
    ) -> None:
        self.work = work
        self.fields = fields
        self.makers = makers
        self.numbered = numbered
        self.own = work.method.owner or ""
        asked = (call for call in work.method.calls if own_attribute(call.func, self.own) in lending)
        self.marked = read_off(work, fields) | {id(call) for call in asked}
        self.of_stock = work.derived(frozenset(), self.marked)
        self.known = work.derived(work.told, self.marked)

    @property
    def joins(self) -> bool:
        """`add_worker(worker)`: whoever calls that may bring another for one that is dead. Further numbers
        come to those that there are."""
        puts = any(
            put.field in self.fields
            and not (_is_numbers(put.thing) or mentions(put.thing, self.of_stock, self.marked))
            for put in self.work.put
        )
        return puts and not JOINING.isdisjoint(split(self.work.method.name))

    def grows(self) -> bool:
        """Whether something may come to the stock that was not in it at first."""
        name = self.work.method.name
        if STARTING_OVER.match(name):
            return False
        return self.brings_new() or not all(map(self._conserves, self.makes)) or self.makes_where_empty()

    def brings_new(self) -> bool:
        """Whether it puts something into a store that never was in one, and was not told."""
        put = [put.thing for put in self.work.put if put.field in self.fields]
        return any(self._is_new(value) for value in put) or any(
            not mentions(value, self.known, self.marked) for value in self._set_anew()
        )

    def _is_new(self, value: ast.expr) -> bool:
        """What goes into the store was never in it."""
        if isinstance(value, ast.Call) and last_part(value.func) in self.makers:
            return not self._conserves(value)
        return not mentions(value, self.known, self.marked)

    @property
    def makes(self) -> list[ast.Call]:
        """Where one more of the things is made, whatever becomes of it; tensors are made for much else, and
        `queue.empty()` makes none."""
        named = (call for call in self.work.method.calls if last_part(call.func) in self.makers)
        makers = (call for call in named if call.args or call.keywords or last_part(call.func) not in MAKERS)
        return [call for call in makers if getattr(_maker_of(call), "id", "") not in OF_ARRAYS]

    def makes_where_empty(self) -> bool:
        takes = bool(taken_ids(self.work, self.fields))
        return (
            takes and not self.numbered and hands_out_new(self.work, self.of_stock, self.marked, frozenset())
        )

    def _conserves(self, call: ast.Call) -> bool:
        """`Worker(worker.rank)`, `Gap(gap.start, n)`; `Connection(host)` where another one is broken."""
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        return any(
            mentions(each, self.of_stock, self.marked) or self._is_about_one(each) for each in arguments
        ) or any(True for _ in (*self._tests_around(call), *self._turns_around(call)))

    @cached_property
    def _things(self) -> Set[str]:
        """Local names of single things: those taken out, and those that it was told to put in."""
        put = {name for each in self.work.put for name in _named(each.value)}
        return self.work.derived(frozenset(), taken_ids(self.work, self.fields)) | put

    def _is_about_one(self, test: ast.expr) -> bool:
        """`line.broken`, `self.is_bad(line)`, and not `line is None`."""
        for node in walk(test):
            match node:
                case ast.Attribute(value=ast.Name(id=name)) | ast.Subscript(value=ast.Name(id=name)):
                    if name in self._things:
                        return True
                case ast.Call(args=[ast.Name(id=name)]) if name in self._things:
                    return True
        return False

    def _tests_around(self, call: ast.Call) -> Iterator[ast.expr]:
        """Conditions on one of the things, on which this call depends."""
        for node in self.work.method.nodes:
            asks = isinstance(node, (ast.If, ast.IfExp)) and self._is_about_one(node.test)
            if isinstance(node, (ast.If, ast.IfExp)) and asks and any(each is call for each in walk(node)):
                yield node.test

    def _turns_around(self, call: ast.Call) -> Iterator[ast.stmt]:
        """Loops that take one out before they make this one, in each turn."""
        taken = taken_ids(self.work, self.fields)
        for loop in self.work.method.statements:
            if isinstance(loop, ast.For | ast.AsyncFor | ast.While):
                nodes = [node for part in loop.body for node in walk(part)]
                lines = (node.lineno for node in nodes if isinstance(node, ast.expr) and id(node) in taken)
                if any(each is call for each in nodes) and any(line < call.lineno for line in lines):
                    yield loop

    def _set_anew(self) -> Iterator[ast.expr]:
        for node in self.work.method.statements:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Assign) and any(
                own_attribute(t, self.own) in self.fields and not is_empty(node.value) for t in targets
            ):
                yield node.value


def is_empty(value: ast.expr) -> bool:
    """A container in which there is nothing yet."""
    match value:
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=[]):
            return name == "defaultdict" or (name in AROUND and not args)
    return False


def _is_numbers(value: ast.expr) -> bool:
    """`range(old, old + more)`, `reversed(range(...))`."""
    while isinstance(value, ast.Call) and last_part(value.func) in AROUND and value.args:
        value = value.args[0]
    return isinstance(value, ast.Call) and last_part(value.func) in NUMBERING


def _maker_of(call: ast.Call) -> ast.expr | None:
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _named(value: ast.expr) -> Iterator[str]:
    """`c`, `Connection() if c.broken else c`, `(rank, c)`."""
    match value:
        case ast.Name(id=name):
            yield name
        case ast.IfExp(body=one, orelse=other):
            yield from (*_named(one), *_named(other))
        case ast.Tuple(elts=elements):
            yield from (name for each in elements for name in _named(each))
