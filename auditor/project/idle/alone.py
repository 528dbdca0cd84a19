"""What of a pool's stock only a table of its own knows, and a method of the pool drops from there: a `reset`
that empties the table of lanes in use and leaves those at rest as they are.

Only where everything that comes back to the stock comes out of that table: what callers are told, they may
give back by hand."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from auditor.flow.lease import Field, Leak, Lease, Loss, StoredField
from auditor.flow.trace import span_of
from auditor.model import Span, Step
from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Function
from auditor.project.idle.stock import Stock
from auditor.project.idle.supply import is_empty, read_off, taken_ids
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.shapes.field_work import FieldWork, Put
from auditor.project.shapes.name_bindings import mentions
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

ENDING_THE_POOL = re.compile(r"_*(?:close|shut_?down|stop|destroy|tear_?down|dispose|terminate|a?exit|del)_*")
"""Methods after which nobody asks the pool again."""

FOR_GOOD = frozenset({"retire", "quarantine", "remove", "destroy", "discard", "evict", "kill", "ban", "drop",
                      "fail", "failed", "lost", "lose", "broken", "break", "dead", "die", "bad", "leak",
                      "detach", "disown", "transfer", "adopt", "steal", "keep", "delete", "unregister",
                      "deregister", "commit", "consume", "sell", "complete", "migrate", "export",
                      "poison", "burn", "load", "restore", "setstate"})  # fmt: skip
"""Words of methods by which a thing leaves the pool on purpose."""

MOVING = frozenset({"move", "swap", "switch", "renew", "replace", "rotate", "refresh", "migrate", "relocate",
                    "remap", "reseat", "rebind", "upgrade", "change", "reassign", "exchange"})  # fmt: skip
"""First words of methods that give something else to who has one."""


@dataclass(frozen=True, slots=True)
class Drop:
    """`at` empties the table, or strikes an entry off it."""

    work: FieldWork
    at: ast.stmt
    entry: bool


def lost_alone(stock: Stock) -> Iterator[Lease]:
    """Takes whose table is emptied by a method that puts nothing back."""
    if stock.replaces or stock.counters or not stock.full or _restocks(stock):
        return
    for take, put in _entered(stock):
        back = [(other, work) for work in stock.works for other in work.put if other.field in stock.full]
        if not all(_comes_out_of(other, work, put.field) for other, work in back):
            continue
        drops = [drop for work in stock.works for drop in _drops(stock, work, put.field)]
        if take[0].method.cls is stock.cls and (drops or _moves(stock, take[0], put)):
            yield _lease(stock, take, put, next(iter(drops), None))


def _restocks(stock: Stock) -> bool:
    """A method fills a store anew, and not with what is left of it."""
    return any(
        own_attribute(target, work.method.owner or "") in stock.full
        and not mentions(value, frozenset(), read_off(work, {getattr(target, "attr", "")}))
        for work in stock.works
        for target, value in assignments(work.method)
    )


def _entered(stock: Stock) -> Iterator[tuple[tuple[FieldWork, ast.expr], Put]]:
    """What is taken out of a store and put into a table."""
    for work in stock.works:
        for name, node in work.taken:
            if name not in stock.full or not isinstance(node, ast.Call):
                continue
            derived = work.derived(frozenset(), {id(node)})
            into = [
                put
                for put in work.put
                if put.key is not None and put.field not in stock.full
                if mentions(put.value, derived, {id(node)})
            ]
            if len(into) == 1:
                yield (work, node), into[0]


def _comes_out_of(put: Put, work: FieldWork, table: str) -> bool:
    """It was in the table, `self.idle.add(self.busy.pop(job))`, or was taken from the store here."""
    marked = read_off(work, {table}) | taken_ids(work, {put.field})
    return mentions(put.thing, work.derived(frozenset(), marked), marked)


def _drops(stock: Stock, work: FieldWork, table: str) -> Iterator[Drop]:
    """Of a method that has nothing else to do with the table, and puts nothing into a store."""
    method, own = work.method, work.method.owner or ""
    if ENDING_THE_POOL.fullmatch(method.name) or any(_puts_back(stock, each) for each in _near(stock, work)):
        return
    found = [drop for node in method.statements if (drop := _drop(work, node, own, table))]
    looked = {id(part) for drop in found for part in walk(drop.at)}
    looked |= {id(part) for put in work.put if put.key is not None for part in _places(method, put)}
    looked |= {id(part) for node in method.nodes for part in _asking(node)}
    others = (n for n in method.nodes if isinstance(n, ast.expr) and id(n) not in looked)
    if any(own_attribute(node, own) == table for node in others):
        return
    for_good = not FOR_GOOD.isdisjoint(split(method.name))
    things = bool(stock.makers) or stock.given  # one of them may be broken; a number never is
    meant = for_good or things
    yield from (drop for drop in found if not (meant if drop.entry else for_good and things))


def _moves(stock: Stock, work: FieldWork, put: Put) -> bool:
    """`move(user)` puts a new one where that of the user is, and does not look at it."""
    name, others = work.method.name, {each.method.name for each in stock.works}
    again = split(name)[0] in MOVING or (name.startswith("re") and name.removeprefix("re") in others)
    if not again or stock.makers or stock.given or put.key is None or not work.is_from_told(put.key):
        return False
    known = {id(part) for part in _places(work.method, put)}
    known |= {id(part) for node in work.method.nodes for part in _asking(node)}
    own = work.method.owner or ""
    looked = (n for n in work.method.nodes if isinstance(n, ast.expr) and id(n) not in known)
    return not (
        any(own_attribute(node, own) == put.field for node in looked)
        or any(_puts_back(stock, each) for each in _near(stock, work))
    )


def _near(stock: Stock, work: FieldWork) -> list[FieldWork]:
    """The method, those of its object that it calls, and those that call it."""
    called = _own_calls(work)
    name = work.method.name
    return [
        each for each in stock.works if each is work or each.method.name in called or name in _own_calls(each)
    ]


def _own_calls(work: FieldWork) -> set[str]:
    own = work.method.owner or ""
    found = {own_attribute(call.func, own) for call in work.method.calls}
    return {name for name in found if name}


def _puts_back(stock: Stock, work: FieldWork) -> bool:
    """Into a store, or by what nobody knows: `super().reset()`, `reset_all(self)`, `self.__init__(count)`."""
    own = work.method.owner or ""
    if not _own_calls(work) <= {each.method.name for each in stock.works}:
        return True
    unknown = any(
        isinstance(each, ast.Name) and (each.id == own or each.id == "super")
        for call in work.method.calls
        for each in (call.func, *call.args)
    )
    return unknown or any(put.field in stock.full for put in work.put)


def _drop(work: FieldWork, node: ast.stmt, own: str, table: str) -> Drop | None:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=each, attr="clear"), args=[])):
            return Drop(work, node, False) if own_attribute(each, own) == table else None
        case ast.Assign(targets=[each], value=value) if is_empty(value):
            return Drop(work, node, False) if own_attribute(each, own) == table else None
        case (
            ast.Expr(value=ast.Call(func=ast.Attribute(value=each, attr="pop" | "popitem")))
            | ast.Delete(targets=[ast.Subscript(value=each)])
        ):
            return Drop(work, node, True) if own_attribute(each, own) == table else None
    return None


def _places(method: Function, put: Put) -> Iterator[ast.AST]:
    """`self.busy[job]` where that is set."""
    for target, value in assignments(method):
        if value is put.value and isinstance(target, ast.Subscript):
            yield from walk(target)


def _asking(node: ast.AST) -> Iterator[ast.AST]:
    """`key in self.busy`, `len(self.busy)`"""
    match node:
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[each]):
            yield each
        case ast.Call(func=ast.Name(id="len"), args=[each]):
            yield each


# How it is told ---------------------------------------------------------------------------------------------


def _lease(stock: Stock, take: tuple[FieldWork, ast.expr], put: Put, drop: Drop | None) -> Lease:
    """`drop` is where it goes, or the next one takes its place."""
    work, node = take
    first, kept = _span(work, node), _span(work, put.value)
    at = _span(drop.work, drop.at) if drop is not None else kept
    loss = Loss.OVERWRITTEN if drop is None else Loss.DELETED if drop.entry else Loss.DROPPED
    steps = [(first, "taken out here"), (kept, f"`self.{put.field}` alone knows it"), (at, LAST_WORDS[loss])]
    leak = Leak(loss, at, f"self.{put.field}", tuple(_steps(steps)))
    stored = StoredField(Field(stock.cls.qualname, f"{put.field}[*]"), kept)
    stored = replace(stored, overwrite=leak) if drop is None else replace(stored, drops=(leak,))
    return Lease(
        span=first,
        symbol=work.method.qualname,
        text=" ".join(ast.unparse(node).split()),
        protocol=stock.cls.name,
        holder=f"self.{put.field}",
        handed_over=True,
        fields=(stored,),
    )


def _steps(told: Sequence[tuple[Span, str]]) -> Iterator[Step]:
    return (Step(span.path, span.line, span.column, words) for span, words in told)


def _span(work: FieldWork, at: ast.AST) -> Span:
    module = work.method.module
    return span_of(module.path, at, module.lines)
