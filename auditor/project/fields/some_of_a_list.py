"""Lists of leases which a method takes in hand and of which it sees to a part alone:

    events = self.marks.pop(tag)                rows = self.live[key]
    self.pool.put(events[0])                    best, rest = rows[:keep], rows[keep:]
    self.pool.put(events[-1])                   self.live[key] = best

Each place where the list is spoken of says which part of it is given back or kept there. Where all of them
together are a part, and none does anything that cannot be told, nobody has the others."""

import ast
import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from auditor.ir.calls import LOGGING
from auditor.project.code.bindings import assignments, given_to, own_attribute, root_of
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.fields.half_emptied import TELLING
from auditor.project.fields.partial import InMethod, is_a_number
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

ORDERING = frozenset({"sorted", "list", "reversed", "tuple"})
BEST = frozenset({"nlargest", "nsmallest"})
QUIET = LOGGING | {"print", "len", "bool", "min", "max", "sum", "any", "all", "isinstance"}
SORTING = frozenset({"sort", "reverse", "index", "count"})
KEEPING = frozenset({"append", "extend", "appendleft", "add", "update"})
LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)

_PARTING = re.compile(r"\[[^\]\n]*:|\[-?\d+\]|nlargest\(|nsmallest\(|\.append\(|range\(| for [^\n]* if ")
"""What speaks of a part of a list."""

LooksOn = Callable[[ast.Call], bool]


class Part(Enum):
    """How much of a list is seen to."""

    ALL = auto()
    UPTO = auto()
    FROM = auto()
    ONE = auto()
    SOME = auto()
    UNTOLD = auto()


Portion = tuple[Part, str]
"""With the bound or the place, as it is written."""

WHOLE: Portion = (Part.ALL, "")
UNTOLD: Portion = (Part.UNTOLD, "")


def seen_to_in_part(
    method: Function, attribute: str, ends: Set[str], looks_on: LooksOn, *, rows: bool
) -> Iterator[ast.stmt]:
    """The statements that take such a list in hand, or put the part in its place. `ends` are names of what
    gives such a lease back; with `rows` it is the lists under the keys of a table that are meant."""
    if not _PARTING.search(method.text):
        return
    here = _InHand(method, attribute, ends, looks_on, rows)
    for statement, taken in here.lists():
        portions = set(here.portions(taken))
        if portions and is_a_part(portions):
            yield statement


def is_a_part(portions: Set[Portion]) -> bool:
    """There are leases in a list of any length which none of these has."""
    parts = [part for part, _ in portions]
    if Part.ALL in parts or Part.UNTOLD in parts or parts.count(Part.SOME) > 1:
        return False
    if Part.SOME in parts:
        return len(parts) == 1
    upto = {bound for part, bound in portions if part is Part.UPTO}
    behind = {bound for part, bound in portions if part is Part.FROM}
    single = {bound for part, bound in portions if part is Part.ONE}
    if upto and behind:
        return False
    return not ("0" in single and behind) and not ("-1" in single and upto)


@dataclass(frozen=True)
class _InHand:
    """One method, as far as it speaks of such a list."""

    method: Function
    attribute: str
    ends: Set[str]
    looks_on: LooksOn
    rows: bool

    @cached_property
    def bounds(self) -> InMethod:
        return InMethod(self.method, self.method.owner or "", self.attribute)

    @cached_property
    def around(self) -> dict[int, ast.AST]:
        """What each node stands in."""
        nodes = walk(self.method.node)
        return {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def stored(self) -> list[str]:
        return [n.id for n in self.method.nodes if isinstance(n, ast.Name) and not _is_read(n)]

    # Which lists -------------------------------------------------------------------------------------------

    def lists(self) -> Iterator[tuple[ast.stmt, ast.expr]]:
        """What takes one out of the table, or names one that another is put in the place of; with the
        statement that a finding shows."""
        replacing = self._replacing()
        for node in self.method.nodes:
            if not isinstance(node, ast.expr):
                continue
            if self._takes_out(node):
                yield self._statement(node), node
            elif replacing is not None and self._shows(node) and self._is_named(node):
                yield replacing, node

    def _takes_out(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=table, attr="pop"), args=[_, *_]):
                return self.rows and self._is_field(table)
            case ast.Attribute():
                swapped = self.around.get(id(node))
                match self.around.get(id(swapped)):
                    case ast.Assign(
                        targets=[ast.Tuple(elts=[_, target])],
                        value=ast.Tuple(elts=[first, ast.List(elts=[])]),
                    ):
                        return not self.rows and first is node and self._is_field(target)
        return False

    def _shows(self, node: ast.expr) -> bool:
        if not _is_read(node):
            return False
        if not self.rows:
            return self._is_field(node)
        match node:
            case (
                ast.Subscript(value=table, slice=ast.Name() | ast.Attribute())
                | ast.Call(func=ast.Attribute(value=table, attr="get"))
            ):
                return self._is_field(table)
        return False

    def _is_named(self, node: ast.expr) -> bool:
        """`rows = self.live[key]`, `ranked = sorted(self.live[key])`; or a loop goes over it."""
        within = self.around.get(id(node))
        if isinstance(within, ast.For):
            return within.iter is node
        if isinstance(within, ast.Call) and last_name(within) in ORDERING | BEST:
            within = self.around.get(id(within))
        return isinstance(within, ast.Assign) and isinstance(within.targets[0], ast.Name)

    def _replacing(self) -> ast.stmt | None:
        """The one statement that puts another list in its place."""
        found = [
            node
            for node in self.method.statements
            if isinstance(node, ast.Assign) and any(map(self._is_place, node.targets))
        ]
        return found[0] if len(found) == 1 else None

    def _is_place(self, target: ast.expr) -> bool:
        if self.rows:
            return isinstance(target, ast.Subscript) and self._is_field(target.value)
        return self._is_field(target)

    def _is_field(self, node: ast.expr) -> bool:
        return own_attribute(node, self.method.owner or "") == self.attribute

    def _statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.around[id(node)]
        return node

    # What becomes of them ----------------------------------------------------------------------------------

    def portions(self, whole: ast.expr) -> Iterator[Portion]:
        """What is seen to where the list, or what it was made into, stands."""
        within = self.around.get(id(whole))
        match within:
            case ast.Subscript(value=value, slice=ast.Slice() as cut) if value is whole:
                yield from self._of_a_cut(within, cut)
            case ast.Subscript(value=value) if value is whole:
                yield from self._of_one(within)
            case ast.Call(args=args) if whole in args:
                yield from self._of_a_call(within)
            case ast.Call() | ast.Starred():
                yield UNTOLD
            case ast.Attribute(attr=way) if way in SORTING:
                pass
            case ast.For(iter=over, target=ast.Name(id=turn), body=body, orelse=[]) if over is whole:
                yield from self._of_a_loop(body, turn)
            case ast.comprehension(iter=over) if over is whole:
                yield from self._of_a_comprehension(within)
            case ast.Assign(targets=[target]):
                yield from self._of_a_name(target, whole)
            case ast.Tuple():
                yield from self._of_several(within, whole)
            case ast.If() | ast.While() | ast.UnaryOp(op=ast.Not()) | ast.IfExp() | ast.BoolOp():
                yield from [UNTOLD] if isinstance(within, ast.IfExp) and within.test is not whole else []
            case _:
                yield UNTOLD

    def _of_a_name(self, target: ast.expr, given: ast.expr) -> Iterator[Portion]:
        if isinstance(target, ast.Name):
            if self.stored.count(target.id) != 1:
                yield UNTOLD
                return
            leaving = self._ways_that_leave(self._statement(given))
            for node in self.method.nodes:
                if isinstance(node, ast.Name) and node.id == target.id and id(node) not in leaving:
                    yield from self.portions(node) if _is_read(node) else ()
        elif self._is_kept_in(target):
            yield WHOLE
        else:
            yield UNTOLD

    def _of_several(self, values: ast.Tuple, whole: ast.expr) -> Iterator[Portion]:
        """`best, rest = rows[:n], rows[n:]`, `rows, self.live = self.live, []`"""
        match self.around.get(id(values)):
            case ast.Assign(targets=[ast.Tuple(elts=targets)]) if len(targets) == len(values.elts):
                yield from self._of_a_name(targets[values.elts.index(whole)], whole)
            case _:
                yield UNTOLD

    def _is_kept_in(self, target: ast.expr) -> bool:
        """A field of its own, or of what it was told, or a place of one."""
        table = target.value if isinstance(target, ast.Subscript) else target
        return isinstance(table, ast.Attribute) and root_of(table) in self.method.parameters

    def _of_a_cut(self, part: ast.Subscript, cut: ast.Slice) -> Iterator[Portion]:
        bounds = [each for each in (cut.lower, cut.upper) if each is not None]
        if cut.step is not None or len(bounds) != 1 or not self._is_told(bounds[0]):
            yield UNTOLD
            return
        kind = Part.UPTO if cut.upper is not None else Part.FROM
        for each, _ in self.portions(part):
            yield (kind, ast.unparse(bounds[0])) if each is Part.ALL else UNTOLD

    def _is_told(self, bound: ast.expr) -> bool:
        """By the caller, or set at birth, and not reckoned from how many there are."""
        given = list(given_to(self.method, bound.id)) if isinstance(bound, ast.Name) else []
        return all(is_a_number(each) or self.bounds.is_told(each) for each in given or [bound])

    def _of_one(self, place: ast.Subscript) -> Iterator[Portion]:
        at = ast.unparse(place.slice)
        seen = self._seen_to(place)
        if seen is Part.UNTOLD or (seen and self._is_counted_before(place)):
            yield UNTOLD
        elif at.lstrip("-").isdecimal():
            yield from [(Part.ONE, at)] if seen else []
        else:
            yield from self._by_number(place, at) if seen else [UNTOLD]

    def _is_counted_before(self, place: ast.Subscript) -> bool:
        """`if len(rows) == 1: self.pool.put(rows[0])`"""
        node: ast.AST = place
        while node is not self.method.node:
            inside, node = node, self.around[id(node)]
            if isinstance(node, ast.If) and inside is not node.test and "len(" in ast.unparse(node.test):
                return True
        return False

    def _by_number(self, place: ast.Subscript, at: str) -> Iterator[Portion]:
        """`for i in range(n): self.pool.put(rows[i])`"""
        for node in self.method.statements:
            match node:
                case ast.For(
                    target=ast.Name(id=turn),
                    iter=ast.Call(func=ast.Name(id="range"), args=[bound]),
                    body=[ast.Expr() as only],
                ) if turn == at and self._statement(place) is only:
                    told = isinstance(bound, ast.Name) and bound.id in self.method.parameters
                    yield (Part.UPTO, ast.unparse(bound)) if told else UNTOLD
                    return
        yield UNTOLD

    def _of_a_call(self, call: ast.Call) -> Iterator[Portion]:
        name = last_name(call)
        if name in ORDERING:
            yield from self.portions(call)
        elif name in BEST:
            for each, _ in self.portions(call):
                yield (Part.SOME, "") if each is Part.ALL else UNTOLD
        elif name == "extend" and isinstance(call.func, ast.Attribute):
            yield WHOLE if self._is_kept_in(call.func.value) else UNTOLD
        elif name not in QUIET:
            yield UNTOLD

    def _of_a_comprehension(self, generator: ast.comprehension) -> Iterator[Portion]:
        made = self.around[id(generator)]
        within = self.around.get(id(made))
        if isinstance(within, ast.Call) and last_name(within) in QUIET:
            return
        same = isinstance(made, ast.ListComp) and len(made.generators) == 1
        if not isinstance(made, ast.ListComp) or not same or not _is_same(made.elt, generator.target):
            yield UNTOLD
            return
        if any(map(_says_who_has_it, generator.ifs)):
            yield UNTOLD
            return
        for each, bound in self.portions(made):
            if generator.ifs:
                yield (Part.SOME, "") if each is Part.ALL else UNTOLD
            else:
                yield each, bound

    def _of_a_loop(self, body: list[ast.stmt], turn: str) -> Iterator[Portion]:
        """Every turn, or those that some test chooses to be kept."""
        named = [n for each in body for n in walk(each) if isinstance(n, ast.Name) and n.id == turn]
        places = [(node, self._seen_to(node)) for node in named]
        if any(seen is Part.UNTOLD for _, seen in places):
            yield UNTOLD
            return
        seen_at = [self._statement(node) for node, seen in places if seen is Part.ALL]
        if not seen_at:
            return
        if any(each in body for each in seen_at) and not _is_left_early(body):
            yield WHOLE
            return
        yield self._chosen(body, seen_at)

    def _chosen(self, body: list[ast.stmt], seen_at: list[ast.stmt]) -> Portion:
        """`for row in rows: if row.score > limit: kept.append(row)`"""
        match body, seen_at:
            case [ast.If(test=test, body=[ast.Expr(value=ast.Call() as call) as only], orelse=[])], [at]:
                if at is only and last_name(call) in KEEPING and not _says_who_has_it(test):
                    return Part.SOME, ""
        return UNTOLD

    def _seen_to(self, one: ast.expr) -> Part | None:
        """Whether this place gives the element back or keeps it, None if it only looks at it."""
        node: ast.AST = one
        within = self.around.get(id(node))
        while isinstance(within, ast.Attribute):
            node, within = within, self.around.get(id(within))
        match within:
            case ast.Call(func=func) if func is node:
                return Part.ALL if self._ends(within) else None
            case ast.Call(args=args) if node in args:
                return self._told(within)
            case ast.Compare() | ast.If() | ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.FormattedValue():
                return None
            case ast.keyword():
                return Part.UNTOLD
            case ast.Assign(targets=[ast.Attribute()]) if node is not one and node in within.targets:
                return None
        return Part.UNTOLD

    def _told(self, call: ast.Call) -> Part | None:
        name = last_name(call)
        if self._ends(call):
            return Part.ALL
        if name in KEEPING and isinstance(call.func, ast.Attribute):
            return Part.ALL if self._stays(call.func.value) else Part.UNTOLD
        of_another = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Subscript)
        if name in QUIET or of_another or self.looks_on(call):
            return None
        return Part.UNTOLD

    def _ends(self, call: ast.Call) -> bool:
        return last_name(call) in self.ends or (looks_releasing(call) and last_name(call) not in KEEPING)

    def _stays(self, kept: ast.expr) -> bool:
        """In a field, or in a local list that goes into one."""
        if self._is_kept_in(kept):
            return True
        name = getattr(kept, "id", None)
        return name is not None and any(
            getattr(value, "id", None) == name and self._is_kept_in(target)
            for target, value in assignments(self.method)
        )

    def _ways_that_leave(self, taking: ast.stmt) -> set[int]:
        """What stands in branches behind it that leave: they are ways of their own."""
        found: set[int] = set()
        for node in self.method.statements:
            if isinstance(node, ast.If) and node.lineno > taking.lineno:
                for suite in (node.body, node.orelse):
                    if suite and isinstance(suite[-1], LEAVING):
                        found.update(id(inner) for each in suite for inner in walk(each))
        return found


def _is_read(node: ast.expr) -> bool:
    return not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)


def _is_same(made: ast.expr, turn: ast.expr) -> bool:
    return isinstance(made, ast.Name) and isinstance(turn, ast.Name) and made.id == turn.id


def _is_left_early(body: list[ast.stmt]) -> bool:
    return any(isinstance(inner, LEAVING) for each in body for inner in walk(each))


def _says_who_has_it(test: ast.expr) -> bool:
    """`if row.released`, `if row is not None`: those that are left out have none."""
    if any(isinstance(each, ast.Is | ast.IsNot) for node in walk(test) for each in getattr(node, "ops", ())):
        return True
    if not any(isinstance(node, ast.Compare) for node in walk(test)):
        return True
    named = (getattr(node, "attr", getattr(node, "id", "")) for node in walk(test))
    return any(not TELLING.isdisjoint(split(name)) for name in named if name)
