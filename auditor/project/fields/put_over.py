"""Stores that put a lease over another one, which nothing up to there has touched.

That there is one is said by the method's name, `redraft(sequence)`, or by its own test, `if self.scratch is
None or self.scratch.size < n:`."""

import ast
import re
from collections.abc import Iterator, Sequence, Set

from auditor.flow.follow import known_at_nodes
from auditor.flow.knowledge import Knowledge
from auditor.ir.ops import Call, Store
from auditor.project.code.bindings import assigned_by, assignments, given_to, own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.release_names import ENDING, joins_texts, looks_releasing
from auditor.project.fields.beside_another_table import known_beside
from auditor.project.fields.fallbacks import kept_for_want_of_another
from auditor.project.fields.filling_again import (
    LEAVING,
    Filling,
    attributes_in,
    calls_who_speaks,
    fillings,
    found_in_a_table,
    made_of,
    same,
    told_another,
)
from auditor.project.fields.in_others import Borrowed, Uses
from auditor.project.fields.merged_into import merged_into
from auditor.project.fields.moved_between import comes_from_another_table
from auditor.project.fields.names_of_refillers import is_the_new_one
from auditor.project.fields.only_says_which import only_says_which
from auditor.project.fields.outgrown import CLOCKS
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

OVER = re.compile(
    rf"{ENDING.pattern}|(?:^|_)(?:alive|dead|open(?:ed)?|valid|expired|connected|running|active|live|poll)(?:_|$)"
)
"""What is asked of a thing that may have ended by itself, or been ended by others."""


SIZES = frozenset({"shape", "numel", "size", "capacity", "nbytes", "maxlen"})
"""What a buffer says of how much it holds at most."""

STARTED = frozenset(
    {"submit", "create_task", "ensure_future", "run_in_executor", "apply_async", "start_soon"}
)
"""What these return stands for work that has the lease, and may end it."""


def lent_into(method: Function, call: ast.Call, told: Sequence[str]) -> Iterator[Filling]:
    """Fields, and places in tables, into which what the call lends is put, `self.rows[key] = Row(lease)`
    included. `told` are names that the call itself marks."""
    names = set(told)
    while more := set(_names_given(method, call, names)) - names:
        names |= more
    for node in method.statements:
        put = (*assigned_by(node), *merged_into(method, node)) if node.lineno >= call.lineno else ()
        for target, value in put:
            at, key = (target.value, target.slice) if isinstance(target, ast.Subscript) else (target, None)
            if isinstance(key, ast.Slice | ast.Tuple) and any(isinstance(n, ast.Slice) for n in walk(key)):
                continue  # `self.rows[row, :n] = pages`: memory that is written
            if (
                isinstance(at, ast.Attribute)
                and isinstance(at.value, ast.Name)
                and _carries(value, call, names)
            ):
                key = made_of(method, key) if key is not None else None
                yield Filling(method, at.value.id, at.attr, node, target, key)


def _names_given(method: Function, call: ast.Call, names: set[str]) -> Iterator[str]:
    """`lease`, `row` of `row = Row(lease)`, `rows` of `rows.append(row)`."""
    for target, value in assignments(method):
        if isinstance(target, ast.Name) and _carries(value, call, names):
            yield target.id
    for each in method.calls:
        match each:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append" | "add"), args=[put]):
                if _carries(put, call, names):
                    yield name


def _carries(value: ast.expr, call: ast.Call, names: set[str]) -> bool:
    """What `self.worst = node.hold()` stores comes of that call, and not of the one before. A path that is
    named after what the call marks, `os.path.join(root, key)`, leads to nothing."""
    if isinstance(value, ast.Call) and joins_texts(value):
        return False
    if any(node is not call and isinstance(node, ast.Call) and same(node, call) for node in walk(value)):
        return False
    if isinstance(value, ast.Call) and value is not call and last_name(value) in STARTED:
        return False  # `future = self.executor.submit(self.write, buffer)`
    return any(node is call or (isinstance(node, ast.Name) and node.id in names) for node in walk(value))


def _on_other_ways(filling: Filling) -> Iterator[int]:
    """`if full: self.rows.append(more); return` above the store: who does that never comes there."""
    for node in filling.method.statements:
        if isinstance(node, ast.If) and (node.end_lineno or node.lineno) < filling.line:
            for suite in (node.body, node.orelse):
                if suite and isinstance(suite[-1], ast.Return | ast.Raise):
                    yield from (id(inner) for each in suite for inner in walk(each))


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    return assigned_by(node) if isinstance(node, ast.stmt) else iter(())


def _asks_how_many(test: ast.AST) -> bool:
    """`old.users == 1`"""
    return isinstance(test, ast.Compare) and all(isinstance(op, ast.Eq | ast.NotEq) for op in test.ops)


def _says_how_large(side: ast.expr) -> bool:
    """`self.rows.shape[0]`, `self.rows.numel()`"""
    return any(each.attr in SIZES for each in attributes_in(side))


def _mentions(test: ast.AST, names: Set[str]) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in walk(test))


def _given_to_it(filling: Filling) -> ast.expr:
    """`fresh` of `old, self.row = self.row, fresh`."""
    given = (value for target, value in assigned_by(filling.statement) if target is filling.target)
    return next(given, getattr(filling.statement, "value", filling.target))


class Way:
    """What a method does with the place up to the store."""

    def __init__(
        self,
        filling: Filling,
        call: ast.Call,
        family: Sequence[Function],
        ends: Set[str] = frozenset(),
        borrowed: Borrowed | None = None,
        tensors: bool = False,
    ) -> None:
        """`ends` are what the pool's own ends are called: `self.root.unpin()`. What a call only borrows,
        `self.view(row.span)`, is worked with, and so are `tensors` that are added to others."""
        self.filling = filling
        self.call = call
        self.family = family
        self.method = filling.method
        self.ends = ends
        self.elsewhere = frozenset(_on_other_ways(filling))
        self.uses = Uses(filling.method, known=self.elsewhere, ends=ends, borrowed=borrowed, tensors=tensors)
        value = _given_to_it(filling)
        self.stored = {id(node) for node in walk(value)}
        self.fallback = kept_for_want_of_another(value, filling.target)
        target = {id(node) for node in walk(filling.target)} | self.elsewhere
        self.nodes = [
            node
            for node in self.method.nodes
            if getattr(node, "lineno", filling.line + 1) <= filling.line and id(node) not in target
        ]

    def is_known_to_all(self) -> bool:
        """The place is of the method's own object, of one that it is given, or that it finds in a table or
        in a field of its own: `job = self.current`."""
        owner = self.filling.owner
        given = owner in self.method.parameters and not is_the_new_one(owner)
        return given or self._is_its_own(owner) or found_in_a_table(self.method, owner) is not None

    def _is_its_own(self, name: str) -> bool:
        values = [value for to, value in assignments(self.method) if getattr(to, "id", "") == name]
        own = self.method.owner or ""
        return len(values) == 1 and own_attribute(values[0], own) is not None

    def is_free(self) -> bool:
        """Nothing is there, on all ways to the store."""
        if self._is_looked_for() or self._is_empty_before() or known_beside(self.filling, self.family):
            return True
        if comes_from_another_table(self.filling, self.family):
            return True
        place = ast.unparse(self.filling.target)
        absent = {(f"{place} is None", True), (place, False)}
        for name in self._names_of_it():
            absent |= {(f"{name} is None", True), (name, False)}
        return any(not absent.isdisjoint(known) for known in self._known())

    def _is_looked_for(self) -> bool:
        """`if key in self.rows or self.full: return` above, `if key not in self.rows and wanted:` around it,
        `assert key not in self.rows`, `row = None if key in self.rows else self.pool.take()`."""
        for node in self.nodes:
            if isinstance(node, ast.IfExp) and self._is_taken_where_there_is_none(node):
                return True
            if isinstance(node, ast.Assert) and self._says(node.test, ast.And, ast.NotIn):
                return True
            if isinstance(node, ast.If):
                inside = any(each is self.filling.statement for part in node.body for each in walk(part))
                leaves = isinstance(node.body[-1], LEAVING)
                if inside and self._says(node.test, ast.And, ast.NotIn):
                    return True
                if leaves and not inside and self._says(node.test, ast.Or, ast.In):
                    return True
        return False

    def _is_taken_where_there_is_none(self, choice: ast.IfExp) -> bool:
        if any(each is self.call for each in walk(choice.body)):
            return self._says(choice.test, ast.And, ast.NotIn)
        other = any(each is self.call for each in walk(choice.orelse))
        return other and self._says(choice.test, ast.Or, ast.In)

    def _is_empty_before(self) -> bool:
        """`if self.staged: raise Busy` above."""
        return any(
            isinstance(node, ast.If) and isinstance(node.body[-1], LEAVING) and self._is_field(node.test)
            for node in self.nodes
        )

    def _says(self, test: ast.expr, joined_by: type[ast.boolop], way: type[ast.cmpop]) -> bool:
        if isinstance(test, ast.BoolOp):
            return isinstance(test.op, joined_by) and any(
                self._asks_for_key(each, way) for each in test.values
            )
        return self._asks_for_key(test, way)

    def _asks_for_key(self, test: ast.expr, way: type[ast.cmpop]) -> bool:
        match test:
            case ast.Compare(left=key, ops=[op], comparators=[table]) if isinstance(op, way):
                its = self.filling.key is not None and same(made_of(self.method, key), self.filling.key)
                return its and self._is_field(table)
            case ast.Compare(
                left=ast.Call() as got,
                ops=[ast.Is() | ast.IsNot() as op],
                comparators=[ast.Constant(value=None)],
            ):
                absent = isinstance(op, ast.Is)
            case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as got):
                absent = True
            case ast.Call() as got:
                absent = False
            case _:
                return False
        return absent == (way is ast.NotIn) and self.filling.key is not None and self._is_it(got)

    def _known(self) -> Iterator[Knowledge]:
        """At the acquire, and at the store."""
        graph = self.method.graph
        known = known_at_nodes(graph)
        for node, op in enumerate(graph.ops):
            here = isinstance(op, Call) and op.at is self.call
            if node in known and (here or (isinstance(op, Store) and op.at is self.filling.target)):
                yield known[node]

    def _names_of_it(self) -> Iterator[str]:
        for target, value in assignments(self.method):
            if isinstance(target, ast.Name) and self._is_it(value):
                yield target.id
        for node in self.method.statements:
            if isinstance(node, ast.For) and (name := self._numbered(node)):
                yield name

    def _numbered(self, loop: ast.For) -> str:
        """`page` of `for i, page in enumerate(request.pages):`, where `request.pages[i]` is filled."""
        match loop:
            case ast.For(
                target=ast.Tuple(elts=[ast.Name() as number, ast.Name(id=name)]),
                iter=ast.Call(func=ast.Name(id="enumerate"), args=[over]),
            ) if self._is_field(over) and self.filling.key is not None and same(number, self.filling.key):
                return name
        return ""

    def _is_it(self, value: ast.expr) -> bool:
        """`self.rows[key]`, `self.rows.get(key)`, `self.row`."""
        match value:
            case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[key, *_]):
                pass
            case ast.Subscript(value=table, slice=key):
                pass
            case _:
                return self.filling.key is None and self._is_field(value)
        of_it = self.filling.key is not None and self._is_field(table)
        return of_it and same(made_of(self.method, key), self.filling.key or key)

    def _is_field(self, node: ast.AST) -> bool:
        return isinstance(node, ast.expr) and own_attribute(node, self.filling.owner) == self.filling.field

    def is_untouched(self, aside: Set[int] = frozenset()) -> bool:
        """The method works with what is there, or asks for it, and no more; so does whoever it calls. Of the
        reads `aside` more is known."""
        quoted = any(map(self._quotes, self.method.nodes))
        touched = any(self._touches(node) for node in self.nodes if id(node) not in aside)
        return not (quoted or touched or any(map(self._may_be_over, self.nodes)))

    def is_still_going(self) -> bool:
        """Nothing is asked that says that it has ended by itself."""
        return not (any(map(self._quotes, self.method.nodes)) or any(map(self._may_be_over, self.nodes)))

    def _quotes(self, node: ast.AST) -> bool:
        """Not `pool.book("prefill", key)`, which tells the pool a name."""
        told = any(node is each for each in self.call.args)
        return isinstance(node, ast.Constant) and node.value == self.filling.field and not told

    def _touches(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return node is not self.call and self._may_end(node)
        if not self._is_field(node) or id(node) in self.fallback:
            return False
        assert isinstance(node, ast.Attribute)
        if id(node) in self.stored or not isinstance(node.ctx, ast.Load):
            return True  # `self.rows = self.rows + more`
        return not self._only_works(node)

    def _may_be_over(self, node: ast.AST) -> bool:
        """`self.line.closed`, `worker.is_alive()` of `worker = self.workers.get(name)`."""
        return (
            isinstance(node, ast.Attribute)
            and OVER.search(node.attr) is not None
            and self._is_asked(node.value)
        )

    def _only_works(self, node: ast.Attribute) -> bool:
        match self.uses.parents.get(id(node)):
            case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
                return True
            case ast.Compare():  # `request.row < 0`: that may be what stands for none
                return False
            case ast.Attribute() as part if self._is_copied_into_the_new_one(part):
                return True
            case ast.Subscript(value=whole) if whole is node and self._is_copied_into_the_new_one(node):
                return True
            case ast.Attribute() as part if self._says_which(part):
                return True
            case ast.Attribute(attr="get" | "setdefault") as way:
                return self._goes_nowhere(self.uses.parents[id(way)])
            case ast.Call() as over if isinstance(loop := self.uses.parents.get(id(over)), ast.For):
                name = self._numbered(loop)
                return bool(name) and self.uses.only_works_with(name)
        return self._tells_how_much(node) or self._goes_nowhere(node)

    def _is_copied_into_the_new_one(self, part: ast.AST) -> bool:
        """`wider.view[:n] = self.row.view`, and `self.row.view[:n]` alike; `wider[:n] = self.rows[:n]`."""
        given = self.uses.parents.get(id(part))
        while isinstance(given, ast.Subscript) and given.value is part:
            part, given = given, self.uses.parents.get(id(given))
        match given:
            case ast.Assign(
                targets=[
                    ast.Subscript(
                        value=ast.Name(id=new) | ast.Attribute(value=ast.Name(id=new)), slice=ast.Slice()
                    )
                ]
            ):
                return any(value is self.call for value in given_to(self.method, new))
        return False

    def _tells_how_much(self, node: ast.AST) -> bool:
        """`fresh = pool.take(job.lease.size)`: a part of what is there."""
        part = self.uses.parents.get(id(node))
        return isinstance(part, ast.Attribute) and any(part is each for each in self.call.args)

    def _says_which(self, part: ast.Attribute) -> bool:
        return only_says_which(part, self.uses.parents, self.filling, self.family, self.ends)

    def _goes_nowhere(self, node: ast.AST) -> bool:
        """A name that is the new one's further down is asked for up to there."""
        lent_here = self.call in self.method.calls
        match self.uses.parents.get(id(node)):
            case ast.Assign(targets=[ast.Name(id=name)]) if (
                lent_here and len(list(given_to(self.method, name))) > 1
            ):
                reads = [each for each in self.nodes if isinstance(each, ast.Name) and each.id == name]
                return all(
                    self.uses.is_worked_with(each)
                    for each in reads
                    if isinstance(each.ctx, ast.Load) and each.lineno < self.call.lineno
                )
        return self.uses.is_worked_with(node)

    def _may_end(self, call: ast.Call) -> bool:
        filling, own = self.filling, self.method.owner
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        names = {each.id for each in given if isinstance(each, ast.Name)}
        if own in names or filling.owner in names:
            return True
        if joins_texts(call):
            return False
        called = last_name(call)
        ends = called in self.ends or looks_releasing(call) or ENDING.search(called) is not None
        if ends and filling.key is not None and any(same(each, filling.key) for each in given):
            return True
        if ends and isinstance(call.func, ast.Attribute) and own_attribute(call.func, filling.owner):
            return True
        speaks = own is not None and calls_who_speaks(call, own, filling.field, self.family)
        return speaks and not told_another(call, filling, self.family)

    def asks(self) -> bool:
        """A test of the method's own is about whether there is one, or how large it is; or what is there is
        kept where there is no other."""
        if self.fallback:
            return True
        tests = [test for node in self.nodes if (test := getattr(node, "test", None))]
        return any(map(self._asks_in, tests)) or any(map(self._measures, self._deciding()))

    def names_the_former(self) -> bool:
        """`old = job.pages[i]`, which fails where there is none, and `old = job.page`: `job.pages[i] = page`
        puts another one there. Asked is at most how many have it, `if old.users == 1: return`, and not
        whether it has ended, `if old.expires < now:`."""
        named = any(
            isinstance(target, ast.Name) and not isinstance(value, ast.Call) and self._is_it(value)
            for target, value in (each for node in self.nodes for each in _assigned(node))
        )
        names = set(self._names_of_it())
        about = (test for test in self._deciding() if self._is_of_it(test) or _mentions(test, names))
        return named and all(map(_asks_how_many, about))

    def _measures(self, test: ast.AST) -> bool:
        """`if page.users > 1:`, and not `if lease.deadline < now:`, or `if slot.users == 0:`; also `if
        self.fill == self.rows.shape[0]:`, which says that it is full."""
        for node in walk(test):
            match node:
                case ast.Compare(
                    left=left, ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE()], comparators=[right]
                ):
                    of_it = [side for side in (left, right) if self._is_of_it(side)]
                    zero = any(isinstance(side, ast.Constant) and not side.value for side in (left, right))
                    if len(of_it) == 1 and not zero:
                        return not any(CLOCKS & set(split(each.attr)) for each in attributes_in(of_it[0]))
                case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                    if any(self._is_of_it(side) and _says_how_large(side) for side in (left, right)):
                        return not any(isinstance(side, ast.Constant) for side in (left, right))
        return False

    def _is_of_it(self, side: ast.AST) -> bool:
        """`page.users`, `len(self.rows[key].data)`, and not the page itself."""
        return any(isinstance(node, ast.Attribute) and self._is_asked(node.value) for node in walk(side))

    def _asks_in(self, test: ast.expr) -> bool:
        match test:
            case ast.BoolOp(values=values):
                return any(map(self._asks_in, values))
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self._asks_in(inner)
            case ast.Compare(left=one, ops=[ast.Is() | ast.IsNot()], comparators=[other]):
                return self._is_asked(one) or self._is_asked(other)  # `if node is not request.node:`
        by_key = self._asks_for_key(test, ast.In) or self._asks_for_key(test, ast.NotIn)
        return by_key or self._is_asked(test)

    def _is_asked(self, asked: ast.expr) -> bool:
        return self._is_it(asked) or getattr(asked, "id", "") in self._names_of_it()

    def former_is_told_to_end(self, enders: Sequence[Function]) -> bool:
        """`old = self.rows.get(key)`, and `old.retire(pool)` behind the store: an end of the record's own."""
        names, own = set(self._names_of_it()), {ender.name for ender in enders if ender not in self.family}
        return any(
            isinstance(call.func, ast.Attribute)
            and call.func.attr in own
            and getattr(call.func.value, "id", None) in names
            for call in self.method.calls
        )

    def asks_what_ends(self, enders: Sequence[Function]) -> bool:
        """`if not self.closed: return` above, where who ends what is in the field sets `closed`. What is set
        by one who puts another one there says nothing of that, and what would turn the method away after the
        end, `if request.row is None: return`, says that it has not come to that."""
        ending = [
            ender
            for ender in enders
            if not any(fillings(ender, owner, self.filling.field) for owner in ender.parameters)
        ]
        set_there = {
            node.attr
            for ender in ending
            for node in attributes_in(ender.node)
            if isinstance(node.ctx, ast.Store)
        }
        asked = {node.attr for test in self._deciding() for node in attributes_in(test)}
        told = asked & (set_there - {self.filling.field})
        return any(not self._is_still_unset(attr, ending) for attr in told)

    def _is_still_unset(self, attr: str, ending: Sequence[Function]) -> bool:
        """All that such ends set it to is the opposite of what is known of it at the store."""
        places = {f"{owner}.{attr}" for owner in (self.filling.owner, self.method.owner)}
        values = [
            value
            for ender in ending
            for target, value in assignments(ender)
            if isinstance(target, ast.Attribute) and target.attr == attr
        ]
        known = [
            fact for facts in self._known() for fact in facts if fact[0].removesuffix(" is None") in places
        ]
        there = any(
            fact in known for place in places for fact in ((f"{place} is None", False), (place, True))
        )
        gone = any(fact in known for place in places for fact in ((f"{place} is None", True), (place, False)))
        constants = [value.value for value in values if isinstance(value, ast.Constant)]
        if not constants or len(constants) < len(values) or there == gone:
            return False
        return all(bool(value) == gone for value in constants)

    def asked_where_kept(self) -> frozenset[ast.Attribute]:
        """`row.fit` of `if row is not None and row.fit: return row` above the store."""
        names = set(self._names_of_it())
        kept = any(getattr(n, "id", "") in names for n in self.method.nodes if id(n) in self.elsewhere)
        tests = self._deciding() if kept else ()
        return frozenset(
            node
            for test in tests
            for node in attributes_in(test)
            if any(isinstance(each, ast.Name) and each.id in names for each in walk(node.value))
        )

    def _deciding(self) -> Iterator[ast.AST]:
        """Tests on which the store depends."""
        for node in self.nodes:
            if isinstance(node, ast.If | ast.While):
                inside = [inner for each in (*node.body, *node.orelse) for inner in walk(each)]
                if any(each is self.filling.statement or isinstance(each, LEAVING) for each in inside):
                    yield node.test
