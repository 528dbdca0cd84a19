"""What a pool's own methods take out of its store and drop: a page that is not aligned, a buffer that is too
small, the first pages of a request for which there are not enough.

Only of pools with a fixed stock (`stock`), only what nothing is done with (`flow/untouched`), and not where
the pool's own books say why it is passed over (`reasons`)."""

import ast
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from auditor.flow.asked_twice import asked_just_before
from auditor.flow.follow import EDGES, known_at_nodes
from auditor.flow.lease import Leak, Lease, Loss
from auditor.flow.limits import TooManyStates
from auditor.flow.solve import solve
from auditor.flow.trace import Station, shortest_path, span_of, tell
from auditor.flow.untouched import Ends, Forgetting, Untouched
from auditor.ir.graph import TooLarge
from auditor.ir.ops import Assume, Call, Edge, InPlace, Nop, Op, Path
from auditor.model import Span, Step
from auditor.project.code.lineage import Lineage
from auditor.project.code.modules import Class, Module, last_part
from auditor.project.code.shared_state import OBJECT
from auditor.project.idle.aligned import gaps_in_front, may_align
from auditor.project.idle.alone import lost_alone
from auditor.project.idle.best_so_far import best_passed_over
from auditor.project.idle.charged import charged_for_nothing
from auditor.project.idle.counted import is_maker
from auditor.project.idle.cut_short import cut_short
from auditor.project.idle.ended_things import ENDING, ended_stock, tells_no_end
from auditor.project.idle.objects_that_return import given_back_by_objects
from auditor.project.idle.of_modules import pool_of_module
from auditor.project.idle.placed import placed_stock, placed_takes
from auditor.project.idle.reasons import (
    asks_how_many,
    for_want,
    is_its_own,
    is_told_apart,
    of_those_in_use,
    speaks_of_books,
    suits_others,
)
from auditor.project.idle.remainders import may_cut_holes, remainders
from auditor.project.idle.rests_dropped import rests_dropped
from auditor.project.idle.setting import TakenHere
from auditor.project.idle.shelves import shelf_of
from auditor.project.idle.stock import Stock, begun_and_later, filled_by_others, puts_back, stock_of
from auditor.project.idle.takes import handing_on, takes_of
from auditor.project.leases.last_words import LAST_WORDS
from auditor.project.outcome import loses_normally
from auditor.project.shapes.field_work import FieldWork
from auditor.project.shapes.made_new import hands_out_new
from auditor.protocols.vocabulary import split
from auditor.source.both_ways import written_both_ways
from auditor.source.nodes import walk

GETTING_RID = re.compile(
    r"_*(?:evict|drain|clear|empty|purge|trim|shrink|prune|expire|close|shutdown|remove|discard|drop|delete|gc|collect"
    r"|sweep|reap|clean|retire|flush|destroy|invalidate|reset|dispose|terminate|stop|kill|forget|disconnect|detach"
    r"|unregister|release|cull|kick|reduce|scale|downsize|cap|limit|filter"
    r"|set_(?:\w+_)?(?:limit|size|capacity|bound|max\w*)$)"
)
"""Methods that leave out what is to go."""

TIDYING = frozenset({"defrag", "defragment", "compact", "coalesce", "merge", "sort", "resort", "rebalance",
                     "balance", "rotate", "reorder", "shuffle", "resize", "shift", "move", "promote",
                     "demote", "scan", "repack", "rebuild", "reindex", "audit", "count", "inspect", "survey",
                     "check", "measure", "report", "stats", "peek"})  # fmt: skip
"""Words in the names of methods that put a store in order, or look it over: what was in it is in it
afterwards."""

OTHER_WAYS = re.compile(
    r"self\.\w+\.(?:remove|discard|update|get\((?:block|timeout|True|False))\b"
    r"|del self\.\w+\[|self\.(\w+) = self\.\1\["
)
"""What `written_both_ways` does not look for: `self.free.remove(page)`, `del self.free[:n]`."""

LEAVING = (ast.Return, ast.Raise)
IN_PART = "some of them are handed out, and the others are nowhere"
BEATEN = "a better one takes its place, and the best so far is nowhere"
FORGOTTEN = "the next one is taken, and this one is nowhere"


def with_idle(
    lineage: Lineage, paths: Sequence[str], leases: Sequence[Lease], lending: Set[Class]
) -> tuple[Lease, ...]:
    """These, and what the pools in these files lose of their own, those among them that are known to be
    `lending`; nothing is lost twice, and what is lost without an exception is told rather than what is lost
    by one."""
    found: dict[Span, Lease] = {}
    for path in paths:
        with lineage.project.confessing(path, cost="its pools' own bodies were not followed: "):
            found |= {lease.span: lease for lease in _lost_in(lineage, path, lending)}
    for lease in leases:
        own = found.get(lease.span)
        by_exception = bool(lease.leaks) and own is not None and not loses_normally(own)
        if loses_normally(lease) or lease.fields or by_exception:
            found.pop(lease.span, None)
    kept = (lease for lease in leases if lease.span not in found)
    return tuple(sorted((*kept, *found.values()), key=lambda lease: lease.span))


def _lost_in(lineage: Lineage, path: str, lending: Set[Class]) -> Iterator[Lease]:
    text = lineage.project.sources[path]
    pools, holes, aligned = may_lose_idle(text), may_cut_holes(text), may_align(text)
    module = lineage.project.module(path) if pools or holes or aligned else None
    if module is not None:
        yield from lost_idle(lineage, module, lending) if pools else ()
        yield from remainders(module) if holes else ()
        yield from gaps_in_front(module) if aligned else ()
        yield from rests_dropped(module) if pools or holes else ()


def may_lose_idle(text: str) -> bool:
    """Whether something in the text works on a field both ways, as pools do, or takes out in other ways."""
    return OTHER_WAYS.search(text) is not None or written_both_ways(text)


def lost_idle(lineage: Lineage, module: Module, lending: Set[Class] = frozenset()) -> Iterator[Lease]:
    """Takes in methods of the module's classes, and in its functions, that lose what they took."""
    classes = [cls for _, cls in sorted(module.classes.items())]
    of_functions = pool_of_module(module) if ".pop" in module.text else None
    for cls in (*classes, *([of_functions] if of_functions is not None else [])):
        if "-= " in cls.text and "+= " in cls.text:
            yield from charged_for_nothing(cls, *begun_and_later(lineage, cls))
        if not _may_lose(lineage, cls):
            continue
        stock = _stock_of(lineage, cls, lends=cls in lending)
        lost = [*lost_alone(stock), *_lost_of(stock)] if stock is not None else []
        if stock is not None and lost and not filled_by_others(stock, lineage.project.sources.values()):
            yield from lost
        if ENDING.search(cls.text) and (ended := ended_stock(cls, begun_and_later(lineage, cls)[1])):
            told = {lease.span for lease in lost}
            yield from (lease for lease in _lost_of(ended) if lease.span not in told)


def _stock_of(lineage: Lineage, cls: Class, *, lends: bool) -> Stock | None:
    fixed = stock_of(lineage, cls, lends=lends) or placed_stock(lineage, cls)
    return fixed or shelf_of(cls, *begun_and_later(lineage, cls))


def _may_lose(lineage: Lineage, cls: Class) -> bool:
    """Asked of its bases as well where it takes something out."""
    return may_lose_idle(cls.text) or (
        ".pop" in cls.text
        and (
            any(may_lose_idle(each.text) for each in lineage.lineage(cls)) or bool(given_back_by_objects(cls))
        )
    )


def _lost_of(stock: Stock) -> Iterator[Lease]:
    """By the class's own methods."""
    for work in stock.works:
        if work.method.cls is stock.cls and not work.method.is_abstract:
            yield from _lost_by(stock, work)


def _lost_by(stock: Stock, work: FieldWork) -> Iterator[Lease]:
    handing = {other.method.name for other in stock.works if handing_on(other, stock.fields)}
    takes = [*takes_of(work, stock.fields, handing), *placed_takes(stock, work)]
    for take in takes:
        judge = _Judge(TakenHere(stock, work.method, take, takes), work)
        try:
            leaks = tuple(leak for node in take.nodes(work.method) for leak in judge.leaks(node))
        except (TooLarge, TooManyStates, RecursionError):
            continue  # of what is not followed nothing is said
        leaks = tuple(leak for leak in leaks if leak.loss is not Loss.REBOUND) or leaks  # what comes first
        if not leaks and not GETTING_RID.match(work.method.name) and (left := cut_short(judge.here)):
            leaks = (judge.rest_left_at(left),)
        if not leaks and (better := best_passed_over(judge.here)):
            leaks = (judge.former_left_at(better),)
        if leaks:
            yield judge.lease(leaks)


class _Judge:
    """Follows one take, and says which of its losses are faults."""

    def __init__(self, here: TakenHere, work: FieldWork) -> None:
        self.here = here
        self.work = work
        self.store = here.store
        self.take = here.take
        self.function = here.function
        self.graph = here.function.graph

    def leaks(self, site: int) -> Iterator[Leak]:
        known = known_at_nodes(self.graph).get(site)
        if known is None or (self.take.name and self.here.mentioned_before(self.take.name)):
            return
        domain = Forgetting(self.graph, site, self.here)
        op = self.graph.ops[site]
        place = (self.take.name,) if self.take.name or not isinstance(op, Call) else op.target
        start = Untouched(frozenset({place, *self._key_of_it()}), self.take.several)
        known = frozenset(fact for fact in known if not any(name in fact[0] for name in self.here.stock))
        for name in ("".join(place), *self._asked_before(site)):
            known |= {(name, True), (f"{name} is None", False)}
        entries = [
            (target, start, known) for target, edge in self.graph.successors[site] if edge is Edge.NORMAL
        ]
        solution = solve(self.graph, entries, domain.step, EDGES["calls"])
        for loss, node, held in domain.ends.lost:
            path = shortest_path(self.graph, solution, node, held)
            if self._is_fault(domain.ends, loss, held, path):
                yield self._leak(loss, node, path)

    def _key_of_it(self) -> Iterator[Path]:
        """`offset` of `del self.extents[offset]`: whoever is handed that has what lay there."""
        match self.take.at:
            case ast.Delete(targets=[ast.Subscript(slice=ast.Name(id=key))]) if self.take.name:
                yield (key,)

    def _asked_before(self, site: int) -> Iterator[str]:
        """`first` of `first = self.take()`: who had none for the first has none for this one."""
        for path in asked_just_before(self.graph, site):
            written = sum(getattr(op, "target", None) == path for op in self.graph.ops)
            if len(path) == written == 1:
                yield path[0]

    # Whether it is one --------------------------------------------------------------------------------------

    def _is_fault(self, ends: Ends, loss: Loss, held: Untouched, path: list[Station]) -> bool:
        if self.store.ends:
            return loss is not Loss.RAISE and self._is_left_unended(ends, loss, held, path)
        if loss is not Loss.RAISE and self.here.is_dropped_uncounted:
            return True
        if held.asked < 0 or held.doubted:
            return False
        if self.here.is_rotation and loss is Loss.NEXT_TURN:
            return self._is_passed_over(ends, held)
        if loss is Loss.RAISE and all(station.edge is not Edge.RAISE for station in path):
            return False
        if loss is Loss.RAISE and not held.boxed and self._is_raised_for_another_reason(ends, held):
            return True
        if self.store.counters and self._is_replaced(path):
            return False
        if self.store.makes_more and hands_out_new(
            self.work, frozenset(), {id(self.take.shown)}, frozenset()
        ):
            return False
        asked = self.graph.ops[held.asked]
        test = self.here.tests.get(id(asked.at))
        named = held.roots | ({self.take.name} - {""})
        hands_out = ends.handed_out or self._counts_and_hands_out(asked)
        if test is not None and self._gets_another_otherwise(test, named, path):
            return True
        if loss is not Loss.RAISE and self.here.is_never_counted_down and _speaks_of(test, named):
            return True
        if not (hands_out or ends.passed_on or self._is_booked()):
            return test is not None and self._was_to_stay(test, named, path)
        if isinstance(asked, Call):
            return self._caught(ends, loss, path) if not held.boxed else not self._enough()
        if test is None:
            return False
        box = named if held.boxed else frozenset()  # else it asks for another one
        if loss is not Loss.REBOUND and asks_how_many(self.store, self.function, test, box):
            return for_want(self.store, self.function, test, box, self.take.shown) and not self._enough()
        good = suits_others(self.store, self.function, test, named, self.take.shown)
        good = good or (held.boxed and is_its_own(self.store, self.function, test, self.take.shown))
        kept = held.boxed and puts_back(self.work, named, frozenset(), self.store.fields)
        hands_out = ends.handed_out or self.work.hands_out({id(self.take.shown)}) or self._is_booked()
        return good and (hands_out or kept or self._keeps_all())

    def _is_raised_for_another_reason(self, ends: Ends, held: Untouched) -> bool:
        """`if self.phase is not OPEN: raise Closed`, which says nothing about what was taken; on other ways
        somebody has it then."""
        asked = self.graph.ops[held.asked]
        test = self.here.tests.get(id(asked.at)) if isinstance(asked, Assume) else None
        names = held.roots | ({self.take.name} - {""})
        if test is None or _speaks_of(test, names):
            return False
        return ends.handed_out or ends.passed_on or self._is_booked()

    def _is_left_unended(self, ends: Ends, loss: Loss, held: Untouched, path: list[Station]) -> bool:
        if held.asked >= 0 and isinstance(self.graph.ops[held.asked], Call):
            return self._caught(ends, loss, path)
        test = self.here.tests.get(id(self.graph.ops[held.asked].at)) if held.asked >= 0 else None
        names = held.roots | ({self.take.name} - {""}) | self.here.answers
        about_it = _speaks_of(test, names)
        return test is not None and about_it and not held.boxed and tells_no_end(test)

    def _is_passed_over(self, ends: Ends, held: Untouched) -> bool:
        """Where the others go back or out; what is found out about one may be that it is nowhere else."""
        test = self.here.tests.get(id(self.graph.ops[held.asked].at))
        if test is None or GETTING_RID.match(self.function.name):
            return False
        back = puts_back(self.work, held.roots, {id(self.take.shown)}, self.store.fields)
        return (back or ends.handed_out) and not speaks_of_books(
            self.store, self.function, test, self.take.shown
        )

    def _counts_and_hands_out(self, asked: Op) -> bool:
        """`self.lent += 1` before `return buffer`, on another way of the condition."""
        return isinstance(asked, Assume) and self.work.hands_out({id(self.take.shown)})

    def _caught(self, ends: Ends, loss: Loss, path: list[Station]) -> bool:
        """A handler that is meant for the failure goes on as if nothing had been taken, or raises something
        of its own."""
        ops = [self.graph.ops[station.node].at for station in path]
        handler = next((at for at in ops if isinstance(at, ast.ExceptHandler)), None)
        meant = any(handler is each for guard in self.here.guards for each in guard.handlers)
        raised = (self.graph.ops[station.node].at for station in path if station.edge is Edge.RAISE)
        goes_on = loss is not Loss.RAISE or any(isinstance(at, ast.Raise) and at.exc for at in raised)
        return meant and goes_on and (ends.handed_out or not GETTING_RID.match(self.function.name))

    def _is_replaced(self, path: list[Station]) -> bool:
        """Another one is made on this way, and not counted: it has the place of this one."""
        ops = [self.graph.ops[station.node] for station in path]
        counted = any(isinstance(op, InPlace) and self.here.counts_another(op) for op in ops)
        return not counted and any(isinstance(op, Call) and is_maker(last_part(op.at.func)) for op in ops)

    def _gets_another_otherwise(self, test: ast.expr, named: Set[str], path: list[Station]) -> bool:
        """`if old.numel() >= size: continue`, where the store gets `torch.empty(size)` in place of the
        others."""
        turn = {id(node) for loop in self.here.loops for node in walk(loop)}
        made = [
            call
            for call in self.function.calls
            for put in self.work.put
            if put.field in self.store.fields
            and isinstance(put.thing, ast.Call)
            and is_maker(last_part(put.thing.func))
            and id(call) in turn
            and put.thing in call.args
        ]
        passed = {id(self.graph.ops[station.node].at) for station in path}
        return bool(made) and _speaks_of(test, named) and not any(id(call) in passed for call in made)

    def _was_to_stay(self, test: ast.expr, named: Set[str], path: list[Station]) -> bool:
        """`gone += 1` counts the others that a method gets rid of, and not this one."""
        counts = {
            id(part)
            for loop in self.here.loops
            for node in walk(loop)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
            if isinstance(node.value, ast.Constant) and node.lineno > self.take.shown.lineno
            for part in walk(node)
        }
        counted = any(id(self.graph.ops[station.node].at) in counts for station in path)
        told_apart = is_told_apart(self.store, self.function, test, named, self.take.shown)
        return bool(counts) and not counted and told_apart

    def _is_booked(self) -> bool:
        """What is lent moves to another of the stores, `self.live[ticket] = span`."""
        shown = {id(self.take.shown)}
        others = self.store.fields - {name for name, node in self.work.taken if id(node) in shown}
        return others != self.store.fields and puts_back(self.work, frozenset(), shown, others)

    def _keeps_all(self) -> bool:
        """A method that hands out nothing of the store and puts back only some of it may mean to drop the
        rest."""
        if puts_back(self.work, frozenset(), {id(self.take.shown)}, self.store.fields):
            lent = of_those_in_use(self.store, self.function, self.take.shown)
            return lent or self.store.replaces or not TIDYING.isdisjoint(split(self.function.name))
        return not GETTING_RID.match(self.function.name)

    def _enough(self) -> bool:
        """`if len(self._free) < n: raise`, `if not self.can_take(n): return None` before: then there are."""
        around = {id(node) for loop in self.here.loops for node in walk(loop)}
        line = self.take.shown.lineno
        return any(
            id(node) not in around
            and (node.end_lineno or line) < line
            and (isinstance(node, ast.Assert) or any(isinstance(each, LEAVING) for each in walk(node)))
            and self._measures(node.test)
            for node in self.function.statements
            if isinstance(node, (ast.If, ast.Assert))
        )

    def _measures(self, test: ast.expr) -> bool:
        """It asks the object how many there are, not only whether there are any."""
        own = any(isinstance(node, ast.Name) and node.id == self.here.own for node in walk(test))
        return own and any(isinstance(node, (ast.Compare, ast.Call)) for node in walk(test))

    # How it is told -----------------------------------------------------------------------------------------

    def _leak(self, loss: Loss, node: int, path: list[Station]) -> Leak:
        file, lines = self.function.module.path, self.function.module.lines
        at, first = self._where(loss, node, path), self._span(self.take.shown)
        steps = [Step(file, first.line, first.column, "taken out here"), *tell(self.graph, file, path, lines)]
        words = FORGOTTEN if loss is Loss.NEXT_TURN else LAST_WORDS[loss]
        return Leak(loss, at, self._holder(), (*steps, Step(file, at.line, at.column, words)))

    def rest_left_at(self, at: ast.AST) -> Leak:
        return self._left_at(at, Loss.RETURN, IN_PART)

    def former_left_at(self, at: ast.Name) -> Leak:
        return replace(self._left_at(at, Loss.REBOUND, BEATEN), holder=at.id)

    def _left_at(self, at: ast.AST, loss: Loss, words: str) -> Leak:
        file, first, last = self.function.module.path, self._span(self.take.shown), self._span(at)
        taken = Step(file, first.line, first.column, "taken out here")
        return Leak(loss, last, self._holder(), (taken, Step(file, last.line, last.column, words)))

    def _where(self, loss: Loss, node: int, path: list[Station]) -> Span:
        """The `return`, `continue` or `raise`; else the last condition."""
        left = self.graph.ops[node].at
        if loss is Loss.RETURN and isinstance(left, ast.Return):
            return self._span(left)
        ops = [self.graph.ops[station.node] for station in path]
        passed = [op.at for op in ops if isinstance(op, Nop) and isinstance(op.at, (ast.Continue, ast.Raise))]
        return self._span([*(op.at for op in ops if isinstance(op, Assume)), *passed][-1])

    def _span(self, at: ast.AST) -> Span:
        return span_of(self.function.module.path, at, self.function.module.lines)

    def _holder(self) -> str:
        """The last name that the taking statement binds: `_, _, segment = heappop(self._heap)`."""
        if self.take.name:
            return self.take.name
        for node in self.function.statements:
            if isinstance(node, ast.Assign) and any(each is self.take.shown for each in walk(node.value)):
                bound = [each.id for each in walk(node.targets[0]) if isinstance(each, ast.Name)]
                return next((name for name in reversed(bound) if name != "_"), "")
        return ""

    def lease(self, leaks: tuple[Leak, ...]) -> Lease:
        """As if the store had lent it to its own class, which on other ways puts it back or hands it out."""
        text = " ".join(ast.unparse(self.take.shown).split())
        return Lease(
            span=self._span(self.take.shown),
            symbol=self.function.qualname,
            text=text.replace(f"{OBJECT}.", "") if self.function.is_plain else text,
            protocol=self.store.cls.name,
            holder=self._holder(),
            leaks=leaks,
            handed_over=True,
        )


def _speaks_of(test: ast.expr | None, names: Set[str]) -> bool:
    return test is not None and any(getattr(node, "id", None) in names for node in walk(test))
