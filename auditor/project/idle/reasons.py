"""Why something that was taken out of a store is passed over: it does not suit who asks, or is in a state, or
the store's own books say that it does not belong there."""

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.modules import Function, last_part
from auditor.project.idle.stock import Stock
from auditor.project.idle.switches import is_switch
from auditor.project.shapes.name_bindings import FILLING, mentions
from auditor.project.shapes.pool_state import REMOVERS, own_parameters
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

BOOKS = frozenset({"ref", "refs", "refcount", "refcnt", "references", "count", "counter", "counts", "pin",
                   "pinned", "pins", "used", "use", "uses", "users", "using", "busy", "free", "freed",
                   "alloc", "allocated", "state", "status", "version", "generation", "gen", "epoch", "stamp",
                   "stale", "seen", "cancel", "cancelled", "canceled", "removed", "deleted", "evicted",
                   "owner", "owned", "held", "holder", "holders", "lease", "leased", "taken", "lock",
                   "locked", "hash", "null", "reserved", "sentinel", "placeholder", "dummy", "active",
                   "released", "invalid", "current", "ignore", "ignored", "skip", "exclude", "excluded",
                   "banned", "blocked", "parked", "lent", "rented"})  # fmt: skip
"""Words that tell where the thing is, and whether the entry of the store still counts."""


WORN = frozenset({"alive", "dead", "broken", "bad", "closed", "open", "failed", "failure", "error", "healthy",
                  "unhealthy", "valid", "expired", "age", "born", "corrupt", "poisoned", "usable", "ok",
                  "lost", "connected", "disconnected", "probe", "worn", "retired", "tainted", "defunct",
                  "gone"})  # fmt: skip
"""Words that tell why it is of no use to anybody any more."""


MEASURES = frozenset({"used", "free", "allocated", "alloc", "reserved", "count", "counts"})
"""Of these words those that say how much of it, where a caller says how much he needs."""


AGES = frozenset({"version", "epoch"})
"""Of these words those that say of when it is, where a caller says of when he wants one. A stamp or a
generation may as well tell that the entry is of a thing that was lent meanwhile."""


@dataclass(frozen=True, slots=True)
class Condition:
    """All that a test speaks of, with what its local names were given and its own methods ask."""

    function: Function
    nodes: tuple[ast.AST, ...]
    known: bool

    @property
    def words(self) -> set[str]:
        named = (last_part(node) for node in self.nodes if isinstance(node, (ast.Name, ast.Attribute)))
        return {word.lower() for name in named for word in split(name)}


def suits_others(stock: Stock, function: Function, test: ast.expr, it: Set[str], taking: ast.expr) -> bool:
    """Whether what is passed over here is as good as ever for whoever asks next: it does not suit this
    caller, or is in a state. `it` are the names of what was taken, and of what was read off it."""
    names = {name for name in it if not name.startswith("%")}
    if _is_out_of_date(function, test, names):
        return False
    if _asks_for_its_neighbour(stock, function, test, names):
        return True
    asked = _condition(stock, function, test, taking)
    told = _callers_words(stock, function)
    if not _mentions_any(asked, names):  # nothing that the books say is about this one
        return asked.known and (_mentions_any(asked, told) or is_switch(stock, function, test))
    if not asked.known:
        return False
    words = asked.words - {word for name in names for word in split(name)}
    words -= {word for name in _lists_of_the_caller(test, function) for word in split(name)}
    books = bool(words & BOOKS)
    by_caller = _is_held_against(test, own_parameters(function))
    if stock.alone and any(_is_feature(node, names) for node in walk(test)):
        measured = by_caller and words & BOOKS <= MEASURES and _compares_sizes(test)
        measured = measured or (by_caller and words & BOOKS <= AGES)
        worn = bool(words & WORN) or _asks_own_books(stock, function, asked)
        if (measured or not books) and not worn:
            return True
    if books and of_those_in_use(stock, function, taking):
        return by_caller or not _kept_by_others(stock, function, asked)
    if books:
        return False
    if _asks_own_books(stock, function, asked) and not by_caller:
        return not stock.given and _comes_back_by_nobody(stock, function, asked)
    single = {id(side) for node in asked.nodes for side in _compared_alone(node)}
    features = [node for node in asked.nodes if _is_feature(node, names) and id(node) not in single]
    kept = any(_is_set_by(stock, last_part(node)) for node in features)
    return _mentions_any(asked, told - names) or (bool(features) and not (kept or stock.given))


def _asks_for_its_neighbour(stock: Stock, function: Function, test: ast.expr, names: Set[str]) -> bool:
    """`if first + 1 not in self.free: return None`: another one is not there, and this one is as it was."""
    return any(
        isinstance(left, ast.BinOp)
        and any(getattr(part, "id", None) in names for part in walk(left))
        and all(isinstance(each, ast.Constant | ast.Name | ast.Attribute) for each in (left.left, left.right))
        for node in walk(test)
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.In | ast.NotIn)
        and own_attribute(node.comparators[0], function.owner or "") in stock.fields
        for left in [node.left]
    )


def _is_out_of_date(function: Function, test: ast.expr, names: Set[str]) -> bool:
    """`self.resting.get(port) == until`, of the `until, port` that were taken: where the object's own table
    says otherwise by now, the entry had been struck off long before, and only lay there still."""
    return any(
        isinstance(node, ast.Compare)
        and any(_is_looked_up(function, side, names) for side in (node.left, *node.comparators))
        and any(getattr(side, "id", None) in names for side in (node.left, *node.comparators))
        for node in walk(test)
    )


def _is_looked_up(function: Function, side: ast.expr, names: Set[str]) -> bool:
    match side:
        case ast.Subscript(value=table, slice=ast.Name(id=key)):
            pass
        case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[ast.Name(id=key), *_]):
            pass
        case _:
            return False
    return key in names and own_attribute(table, function.owner or "") is not None


def _lists_of_the_caller(test: ast.expr, function: Function) -> Iterator[str]:
    """`excluded` of `if slot in excluded:`, which one caller says of his own."""
    told = own_parameters(function)
    searched = (each for node in walk(test) for each in _searched(node))
    return (each.id for each in searched if isinstance(each, ast.Name) and each.id in told)


def speaks_of_books(stock: Stock, function: Function, test: ast.expr, taking: ast.expr) -> bool:
    """Whether it tells where the thing is, or whether the entry of the store still counts."""
    return bool(_condition(stock, function, test, taking).words & BOOKS)


def is_its_own(stock: Stock, function: Function, test: ast.expr, taking: ast.expr) -> bool:
    """`if found is None:`, `if pages and page != pages[-1] + 1:`, where the method's own names tell."""
    asked = _condition(stock, function, test, taking)
    exprs = (node for node in asked.nodes if isinstance(node, ast.expr))
    fields = {own_attribute(node, function.owner or "") for node in exprs} - {None}
    books = asked.words & BOOKS - {"free", "count"}
    fields = {name for name in fields if name is not None and _changes(stock, name)}
    return asked.known and not books and fields <= stock.fields | stock.memory


def _is_held_against(test: ast.expr, told: Sequence[str]) -> bool:
    """`self.blocks[number].key == keep`, `now - page.stamp < self.limit`: what one caller says, the store's
    books do not know. What he says may as well be where to look: `self.blocks[keep].number == number`."""
    compared = [node for node in walk(test) if isinstance(node, ast.Compare)]
    looked_up = {
        id(part)
        for node in walk(test)
        for where in ([node.slice] if isinstance(node, ast.Subscript) else getattr(node, "args", ()))
        for part in walk(where)
    }
    return any(
        isinstance(node, ast.Name) and node.id in told and id(node) not in looked_up
        for each in compared
        for node in walk(each)
    )


def _compares_sizes(test: ast.expr) -> bool:
    """`dev.total - dev.used >= needed`"""
    orders = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return any(isinstance(node, ast.Compare) and isinstance(node.ops[0], orders) for node in walk(test))


def of_those_in_use(stock: Stock, function: Function, taking: ast.expr) -> bool:
    """It comes from a table of what was lent, `key, entry = self.entries.popitem()`: it was known there."""
    works = (work for work in stock.works if work.method is function)
    return any(node is taking and name not in stock.full for work in works for name, node in work.taken)


def _kept_by_others(stock: Stock, function: Function, asked: Condition) -> bool:
    """Another method that puts something into a store knows what is asked for: `unpin(entry)`."""
    own = function.owner or ""
    words = {node.attr for node in asked.nodes if isinstance(node, ast.Attribute)} - stock.fields - {own}
    return any(
        words & {node.attr for node in work.method.nodes if isinstance(node, ast.Attribute)}
        for work in stock.works
        if work.method is not function and any(put.field in stock.fields for put in work.put)
    )


def _comes_back_by_nobody(stock: Stock, function: Function, asked: Condition) -> bool:
    """`if bucket.key in self.tagged: return None`, where `untag(bucket)` strikes it off that table, and puts
    it into no store."""
    own = function.owner or ""
    tables = {own_attribute(node, own) for node in asked.nodes if isinstance(node, ast.expr)} - {None}
    tables -= stock.fields
    striking = [
        work
        for work in stock.works
        if work.method is not function and any(name in tables for name, _ in (*work.taken, *work.removed))
    ]
    return bool(striking) and not any(put.field in stock.fields for work in striking for put in work.put)


def is_told_apart(stock: Stock, function: Function, test: ast.expr, it: Set[str], taking: ast.expr) -> bool:
    """Whether this asks the thing itself, or holds its number against a bound: `if number < self.limit:`."""
    asked = _condition(stock, function, test, taking)
    books = any(mentions(part, it, frozenset()) for node in asked.nodes for part in _keys(node))
    return asked.known and _mentions_any(asked, it) and not (asked.words & BOOKS - {"free", "count"} or books)


def _keys(node: ast.AST) -> Iterator[ast.AST]:
    """What something is looked up by."""
    match node:
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()]):
            yield left
        case ast.Subscript(slice=key):
            yield key
        case ast.Call(func=ast.Attribute(), args=args):
            yield from args


def asks_how_many(stock: Stock, function: Function, test: ast.expr, box: Set[str]) -> bool:
    """`if not self._free:`, `if len(pages) < n:`, and not what asks single ones: `if pages[0] % n:`,
    `if key in self._rows:`, `if any(page > n for page in pages):`."""
    own = function.owner or ""
    single = (node for node in walk(test) if isinstance(node, ast.Subscript | ast.GeneratorExp))
    parts = {id(part) for node in single for part in walk(node)}
    parts |= {id(table) for node in walk(test) for table in _searched(node)}
    return any(
        id(node) not in parts and (own_attribute(node, own) in stock.fields or getattr(node, "id", "") in box)
        for node in walk(test)
        if isinstance(node, ast.expr)
    )


def for_want(stock: Stock, function: Function, test: ast.expr, box: Set[str], taking: ast.expr) -> bool:
    """`if not self._free:`, `if len(pages) < n:`, said when the store holds too few."""
    asked = _condition(stock, function, test, taking)
    named = {word for name in (*box, *stock.fields) for word in split(name)}  # a local `taken` is no book
    books = asked.words & BOOKS - {"free", "count"} - named
    if not asked.known or books or _asks_own_books(stock, function, asked):
        return False
    if any(_finds_nothing(node, box) for node in walk(test)):
        return False  # there is something in it
    own = function.owner or ""
    stores = any(isinstance(n, ast.expr) and own_attribute(n, own) in stock.fields for n in asked.nodes)
    return stores or _mentions_any(asked, {*box, *own_parameters(function)})


def _finds_nothing(node: ast.AST, box: Set[str]) -> bool:
    """`not pages`, `len(pages) == 0`."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)):
            return name in box
        case ast.Compare(left=ast.Call(args=[ast.Name(id=name)]), comparators=[ast.Constant(value=0 | 1)]):
            return name in box
    return False


def _callers_words(stock: Stock, function: Function) -> Set[str]:
    """Names that have to do with what the method is told, the loops over that included."""
    work = next((work for work in stock.works if work.method is function), None)
    return work.from_told if work is not None else set(own_parameters(function))


def whole_tests(function: Function) -> dict[int, ast.expr]:
    """By each of its parts the condition of an `if`, a `while`, a conditional expression, a comprehension."""
    tests: list[ast.expr] = []
    for node in function.nodes:
        if isinstance(node, ast.comprehension):
            tests += node.ifs
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            tests.append(node.test)
    return {id(part): test for test in tests for part in walk(test)}


def _condition(stock: Stock, function: Function, test: ast.expr, taking: ast.expr) -> Condition:
    nodes: list[ast.AST] = []
    known = True
    pending: list[ast.AST] = [test]
    seen: set[str] = set()
    own = function.owner or ""
    if isinstance(
        taking, ast.Subscript
    ):  # how the place was found is no book: `row = self._used.index(False)`
        seen |= {node.id for node in walk(taking.slice) if isinstance(node, ast.Name)}
    while pending:
        for node in walk(pending.pop()):
            nodes.append(node)
            if isinstance(node, ast.Name) and node.id not in seen | {own, *own_parameters(function)}:
                seen.add(node.id)
                given = [value for value in given_to(function, node.id) if not _within(taking, value)]
                pending += given
            elif isinstance(node, ast.Call) and (name := own_attribute(node.func, own)) is not None:
                method = next((work.method for work in stock.works if work.method.name == name), None)
                known = known and method is not None
                if method is not None and name not in seen:
                    seen.add(name)
                    pending += [each.value for each in _returns(method) if each.value is not None]
    return Condition(function, tuple(nodes), known)


def _within(call: ast.expr, value: ast.expr) -> bool:
    return any(node is call for node in walk(value))


def _returns(method: Function) -> Iterator[ast.Return]:
    return (node for node in method.statements if isinstance(node, ast.Return))


def _mentions_any(asked: Condition, names: Set[str]) -> bool:
    return any(_is_one_of(node, names) for node in asked.nodes)


def _is_one_of(node: ast.AST, names: Set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_feature(node: ast.AST, names: Set[str]) -> bool:
    """`seg.dirty`, `buffer[:64]`, `page % 2`, `self.memory[page]`, `probe(port)`."""
    match node:
        case (
            ast.Attribute(value=ast.Name(id=name))
            | ast.Subscript(value=ast.Name(id=name))
            | ast.Subscript(slice=ast.Name(id=name))
            | ast.BinOp(left=ast.Name(id=name))
            | ast.Call(args=[*_, ast.Name(id=name) | ast.Tuple(elts=[*_, ast.Name(id=name)])])
        ):
            return name in names
    return False


def _compared_alone(node: ast.AST) -> Iterator[ast.expr]:
    """`slot.number == 0`: that one is reserved. Of `number % 2 == 0` there are many."""
    match node:
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot()], left=left, comparators=sides):
            yield from (side for side in (left, *sides) if not isinstance(side, ast.BinOp | ast.Call))


def _is_set_by(stock: Stock, attr: str) -> bool:
    """Whether the class itself writes this attribute of its things where they come and go."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == attr and isinstance(node.ctx, ast.Store)
        for work in stock.works
        if {name for name, _ in work.taken} & stock.fields or any(p.field in stock.fields for p in work.put)
        for node in work.method.nodes
    )


def _asks_own_books(stock: Stock, function: Function, asked: Condition) -> bool:
    """Whether it reads fields of the object that change, or looks something up in one."""
    own = function.owner or ""
    methods = {work.method.name for work in stock.works}
    fields = {
        name
        for node in asked.nodes
        if isinstance(node, ast.expr) and (name := own_attribute(node, own)) is not None
    } - stock.fields - stock.memory - stock.idle_marks - methods  # fmt: skip
    at_places = [node for node in asked.nodes if isinstance(node, ast.Subscript)]
    things = stock.fields | stock.memory | stock.idle_marks
    in_store = {id(node) for node in at_places if own_attribute(node.value, own) in things}
    looked_up = {id(place) for node in asked.nodes if id(node) not in in_store for place in _tables(node)}
    return any(_changes(stock, field) for field in fields) or any(
        id(node) in looked_up and own_attribute(node, own) is not None
        for node in asked.nodes
        if isinstance(node, ast.expr)
    )


def _searched(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for op, each in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, (ast.In, ast.NotIn)):
                yield each


def _tables(node: ast.AST) -> Iterator[ast.AST]:
    yield from _searched(node)
    match node:
        case ast.Subscript(value=table) | ast.Call(func=ast.Attribute(value=table)):
            yield table


def _changes(stock: Stock, field: str) -> bool:
    for work in stock.works:
        own = work.method.owner or ""
        for node in work.method.nodes:
            match node:
                case ast.Attribute(ctx=ast.Store() | ast.Del()) if own_attribute(node, own) == field:
                    return True
                case ast.Subscript(value=table, ctx=ast.Store() | ast.Del()):
                    if own_attribute(table, own) == field:
                        return True
                case ast.Call(func=ast.Attribute(value=table, attr=way)) if way in FILLING | REMOVERS:
                    if own_attribute(table, own) == field:
                        return True
    return False
