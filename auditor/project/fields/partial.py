"""Containers of which a method gives back a part, and then lets go of the rest: `for lane in self.lanes[1:]:`
before `self.lanes.clear()`."""

import ast
from collections.abc import Callable, Iterator, Set

from auditor.project.code.bindings import assignments, own_attribute, suites_of
from auditor.project.code.modules import Function, last_part
from auditor.project.fields.cleared_beside_others import empties
from auditor.source.nodes import walk

AROUND = frozenset({"list", "tuple", "sorted", "reversed", "iter"})
ENDS = frozenset({"pop", "popleft", "popitem"})
EMPTY = frozenset({"list()", "dict()", "set()", "deque()", "[]", "{}", "None"})
ADDING = frozenset({"append", "extend", "appendleft"})
RECKONING = frozenset({"min", "max", "abs", "int", "ceil", "floor"})
LOOPS = (ast.For, ast.AsyncFor, ast.While)


def rest_dropped(method: Function, attribute: str, storing: Function) -> Iterator[ast.stmt]:
    """The statements that let go of it, in a method that gives back what it takes of the field. `storing` is
    where the leases come from: what it puts there once is no list."""
    own = method.owner
    if own is None or not _is_empty_at_first(storing, attribute):
        return
    here = InMethod(method, own, attribute)
    ending = [node for node in method.statements if here.lets_go(node)]
    inside = {id(part) for node in ending for part in walk(node)}
    parts = [each for each in here.parts() if id(each[0]) not in inside]
    if len(parts) != 1 or here.is_used_beside(parts[0][0], inside):
        return
    part, single = parts[0]
    if single and _has_one_at_most(storing, attribute):
        return
    for node in ending:
        later = node.lineno > part.lineno and id(node) not in here.repeated
        if later and (single or here.lets_all_go(node)):
            yield node


def taken_apart(method: Function, attribute: str) -> Iterator[ast.stmt]:
    """`key, value = self.pairs.pop(tag)`"""
    for node in method.statements:
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=ast.Call(func=ast.Attribute(value=whole, attr=way))):
                if way in ("pop", "popleft") and own_attribute(whole, method.owner or "") == attribute:
                    yield node


def gone_over_apart(method: Function, attribute: str) -> Iterator[ast.stmt]:
    """`self.spans.clear()` behind `for name, begin, end in self.spans: self.events.put(begin)`."""
    own = method.owner or ""
    for suite in suites_of(method.node):
        for at, loop in enumerate(suite):
            match loop:
                case ast.For(target=ast.Tuple(), iter=over) if own_attribute(over, own) == attribute:
                    yield from (each for each in suite[at + 1 :] if empties(each, own, attribute))


def unpacked_from(method: Function, attribute: str, parts: Set[str]) -> Iterator[str]:
    """`slab` and `event` of `key, slab, event = self.inflight[0]`, or `.popleft()`, for `[1]` and `[2]`."""
    for target, value in assignments(method):
        match target, value:
            case (
                ast.Tuple(elts=names),
                ast.Subscript(value=whole)
                | ast.Call(func=ast.Attribute(value=whole, attr="pop" | "popleft")),
            ) if own_attribute(whole, method.owner or "") == attribute:
                for number, name in enumerate(names):
                    if isinstance(name, ast.Name) and f"[{number}]" in parts:
                        yield name.id


def lists_them(storing: Function) -> bool:
    """It makes a list of those that it stores."""
    return any(last_part(call.func) in ADDING for call in storing.calls) or _has_a_loop(storing)


LooksOn = Callable[[ast.Call], bool]
"""Whether a call leaves what it is told to whoever has it."""


def popped_in_part(
    method: Function, attribute: str, looks_on: LooksOn | None = None, field: str = ""
) -> Iterator[ast.Assign]:
    """`blocks = self.tables.pop(key)`, of which no more is spoken than `blocks[0]` or `blocks[1:]`, or in
    loops that only tell calls of each which look on. So of `entry.blocks` if a `field` of what is popped is
    asked."""
    for node in method.statements:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=table, attr="pop" | "popleft")),
            ):
                here = (
                    _FieldOfPopped(method, name, field)
                    if field
                    else _Popped(method, method.owner or "", name)
                )
                parts = here.parts() if own_attribute(table, method.owner or "") == attribute else []
                if len(parts) == 1 and not here.is_used_beside(parts[0][0], here.looked_through(looks_on)):
                    yield node


def keeps_the_part(method: Function, popped: ast.Assign) -> bool:
    """The part of it that is spoken of joins another list of the object: `self.lanes[key].extend(part)`."""
    for call in method.calls:
        match call:
            case ast.Call(
                func=ast.Attribute(value=to, attr="extend"), args=[ast.Subscript(value=ast.Name(id=name))]
            ):
                table = _looked_up_in(to)
                if name == getattr(popped.targets[0], "id", "") and own_attribute(table, method.owner or ""):
                    return True
    return False


def _looked_up_in(row: ast.expr) -> ast.expr:
    """`self.lanes` of `self.lanes[key]` and `self.lanes.setdefault(key, [])`."""
    match row:
        case ast.Subscript(value=table):
            return table
        case ast.Call(func=ast.Attribute(value=table, attr="setdefault")):
            return table
    return row


class InMethod:
    """One method, as far as it works with one field."""

    def __init__(self, method: Function, own: str, attribute: str) -> None:
        self.method = method
        self.own = own
        self.attribute = attribute
        loops = [node for node in method.nodes if isinstance(node, LOOPS)]
        self.repeated = {id(inner) for loop in loops for part in loop.body for inner in walk(part)}

    def is_it(self, node: ast.expr) -> bool:
        """`self.lanes`, `list(self.lanes.values())`"""
        match node:
            case ast.Call(func=ast.Name(id=around), args=[inner]) if around in AROUND:
                return self.is_it(inner)
            case ast.Call(func=ast.Attribute(value=inner, attr="values" | "items" | "keys"), args=[]):
                return self.is_it(inner)
        return own_attribute(node, self.own) == self.attribute

    def is_named(self, node: ast.expr) -> bool:
        return own_attribute(node, self.own) == self.attribute

    def parts(self) -> list[tuple[ast.expr | ast.stmt, bool]]:
        """The expressions that take some of it and leave others, with whether that is a single one."""
        found: list[tuple[ast.expr | ast.stmt, bool]] = []
        for node in self.method.nodes:
            match node:
                case ast.Subscript(value=whole, slice=ast.Slice() as cut, ctx=ast.Load()):
                    if self.is_it(whole) and self._leaves_some(cut):
                        found.append((node, False))
                case ast.Call(func=func, args=[whole, bound]) if last_part(func) == "islice":
                    if self.is_it(whole) and (is_a_number(bound) or self.is_told(bound)):
                        found.append((node, False))
                case (
                    ast.Subscript(value=whole, slice=ast.Constant(value=0), ctx=ast.Load())
                    | ast.Subscript(value=whole, slice=ast.UnaryOp(operand=ast.Constant()), ctx=ast.Load())
                    | ast.Call(func=ast.Attribute(value=whole, attr="pop" | "popleft" | "popitem"), args=[])
                    | ast.Call(func=ast.Name(id="next"), args=[whole])
                ):
                    if self.is_it(whole) and id(node) not in self.repeated:
                        found.append((node, True))
                case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[*_, bound] as told)):
                    if self._counts_less(told, bound):
                        found.append((node, False))
                case ast.Call(func=ast.Name(id="zip"), args=[whole, other, *_]):
                    if any(map(self.is_it, (whole, other))) and (
                        self._is_shorter(other) or self._is_shorter(whole)
                    ):
                        found.append((node, False))
                case ast.For(
                    target=ast.Tuple(elts=[ast.Name(id=turn), ast.Name()]),
                    iter=ast.Call(func=ast.Name(id="enumerate"), args=[whole]),
                    body=[ast.If(test=test, orelse=[])],
                ):
                    if self.is_it(whole) and self._asks_only(test, turn):
                        found.append((node.iter, False))
        return found

    def _leaves_some(self, cut: ast.Slice) -> bool:
        """Whatever the length, once there are enough: `[1:]`, `[::2]`, `[:-1]`, `[: self.window]` of a width
        that is told once."""
        lower, step = cut.lower, cut.step
        if step is not None and ast.unparse(step) not in ("1", "-1"):
            return isinstance(step, ast.Constant)
        if lower is not None and ast.unparse(lower) != "0":
            return is_a_number(lower) and cut.upper is None
        return cut.upper is not None and (is_a_number(cut.upper) or self.is_told(cut.upper))

    def _counts_less(self, told: list[ast.expr], bound: ast.expr) -> bool:
        """`range(1, len(self.lanes))`, `range(len(self.lanes) - 1)`"""
        match told, bound:
            case [ast.Constant(value=int() as first), _], ast.Call(func=ast.Name(id="len"), args=[whole]):
                return first > 0 and self.is_it(whole)
            case [_], ast.BinOp(
                left=ast.Call(func=ast.Name(id="len"), args=[whole]), op=ast.Sub(), right=ast.Constant()
            ):
                return self.is_it(whole)
        return False

    def _is_shorter(self, other: ast.expr) -> bool:
        """What is left of a list by a filter, `[row for row in batch.rows if row.valid]`, by its name."""
        name = getattr(other, "id", "")
        given = [value for target, value in assignments(self.method) if getattr(target, "id", None) == name]
        return len(given) == 1 and (
            isinstance(given[0], ast.ListComp) and any(each.ifs for each in given[0].generators)
        )

    def is_told(self, bound: ast.expr) -> bool:
        """By a parameter, a field that is set at birth, or reckoned from such: `self.pages_for(tokens)`."""
        match bound:
            case ast.Call(func=ast.Attribute() as way, args=[_, *_] as args, keywords=[]):
                return self._only_reckons(way) and all(map(self.is_told, args))
            case ast.BinOp(left=left, right=right):
                both = (left, right)
                return all(is_a_number(each) or self.is_told(each) for each in both)
        name = own_attribute(bound, self.own)
        if name is None or self.method.cls is None:
            return isinstance(bound, ast.Name) and bound.id in self.method.parameters
        written = [
            method.name
            for method in self.method.cls.methods.values()
            for node in method.nodes
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
        ]
        return written == ["__init__"]

    def _only_reckons(self, way: ast.Attribute) -> bool:
        """A method of the object's own that asks none of its tables how many there are."""
        name = own_attribute(way, self.own) or ""
        asked = self.method.cls.methods.get(name) if self.method.cls is not None else None
        return asked is not None and not any(
            isinstance(node, ast.Subscript)
            or (isinstance(node, ast.Call) and last_part(node.func) not in RECKONING)
            for statement in asked.statements
            for node in walk(statement)
        )

    def _asks_only(self, test: ast.expr, turn: str) -> bool:
        """`if turn % 2 == 0:`"""
        names = {node.id for node in walk(test) if isinstance(node, ast.Name)}
        return names == {turn} and not any(isinstance(node, ast.Call) for node in walk(test))

    def is_used_beside(self, part: ast.AST, ending: set[int]) -> bool:
        """Beyond that part, what lets go of it, and asking whether there is something in it, or how much."""
        asking = [node.test for node in self.method.nodes if isinstance(node, ast.If)]
        asked = {id(inner) for test in asking if _asks_for_some(test) for inner in walk(test)}
        tested = {id(inner) for test in asking for inner in walk(test)}
        measured = (call for call in self.method.calls if last_part(call.func) == "len")
        asked |= {id(each) for call in measured if id(call) not in tested for each in call.args}
        known = ending | asked | {id(inner) for inner in walk(part)}
        return any(
            id(node) not in known
            for node in self.method.nodes
            if isinstance(node, ast.expr) and self.is_named(node)
        )

    def lets_go(self, node: ast.stmt) -> bool:
        """Of everything, or of what is past a mark."""
        match node:
            case ast.Assign(
                targets=[target],
                value=ast.Subscript(value=whole, slice=ast.Slice(lower=None, upper=ast.Name())),
            ):
                return self.is_it(whole) and self.is_it(target)
            case ast.Delete(
                targets=[ast.Subscript(value=whole, slice=ast.Slice(lower=ast.Name(), upper=None))]
            ):
                return self.is_it(whole)
        return self.lets_all_go(node)

    def lets_all_go(self, node: ast.stmt) -> bool:
        match node:
            case (
                ast.Expr(value=ast.Call(func=ast.Attribute(value=whole, attr="clear")))
                | ast.Delete(targets=[ast.Subscript(value=whole, slice=ast.Slice(lower=None, upper=None))])
            ):
                return self.is_it(whole)
            case ast.Assign(targets=[target], value=value):
                return own_attribute(target, self.own) == self.attribute and ast.unparse(value) in EMPTY
        return False


class _Popped(InMethod):
    """The same of a local name."""

    def is_it(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=around), args=[inner]) if around in AROUND:
                return self.is_it(inner)
        return self.is_named(node)

    def is_named(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.attribute and isinstance(node.ctx, ast.Load)

    def looked_through(self, looks_on: LooksOn | None) -> set[int]:
        """What loops go over that do nothing else with an element than to tell such calls."""
        found: set[int] = set()
        if looks_on is None:
            return found
        told = {id(given): call for call in self.method.calls for given in call.args}
        for loop in self.method.nodes:
            match loop:
                case ast.For(
                    target=ast.Tuple(elts=[ast.Name(), ast.Name(id=each)]),
                    iter=ast.Call(func=ast.Name(id="enumerate"), args=[over]),
                ):
                    pass
                case ast.For(target=ast.Name(id=each), iter=over):
                    pass
                case _:
                    continue
            named = (node for node in self.method.nodes if isinstance(node, ast.Name) and node.id == each)
            read = (told.get(id(node)) for node in named if isinstance(node.ctx, ast.Load))
            if self.is_it(over) and all(call is not None and looks_on(call) for call in read):
                found.update(id(inner) for inner in walk(over))
        return found

    def parts(self) -> list[tuple[ast.expr | ast.stmt, bool]]:
        """Of a name that is bound once."""
        bound = [node for node in self.method.nodes if getattr(node, "id", "") == self.attribute]
        once = sum(isinstance(node.ctx, ast.Store) for node in bound if isinstance(node, ast.Name)) == 1
        return super().parts() if once else []


class _FieldOfPopped(_Popped):
    """The same of a field of that."""

    def __init__(self, method: Function, name: str, field: str) -> None:
        super().__init__(method, method.owner or "", name)
        self.field = field

    def is_named(self, node: ast.expr) -> bool:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=field):
                return name == self.attribute and field == self.field
        return False

    def is_used_beside(self, part: ast.AST, ending: set[int]) -> bool:
        """Nor is it in anybody's hands as a whole."""
        looked = {id(node.value) for node in self.method.nodes if isinstance(node, ast.Attribute)}
        whole = (
            node
            for node in self.method.nodes
            if isinstance(node, ast.Name) and node.id == self.attribute and isinstance(node.ctx, ast.Load)
        )
        return any(id(node) not in looked for node in whole) or super().is_used_beside(part, ending)


def _has_a_loop(storing: Function) -> bool:
    return any(isinstance(node, (*LOOPS, ast.comprehension)) for node in walk(storing.node))


def _asks_for_some(test: ast.expr) -> bool:
    """`if self.lanes:`, `if len(self.lanes) > mark:`, and not `if len(self.lanes) == 1:`."""
    compared = (each for node in walk(test) if isinstance(node, ast.Compare) for each in node.comparators)
    return not any(isinstance(each, ast.Constant) and each.value is not None for each in compared)


def is_a_number(node: ast.expr) -> bool:
    number = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(number, ast.Constant) and isinstance(number.value, int)


def _is_empty_at_first(storing: Function, attribute: str) -> bool:
    """Its first entry may be something that nobody gives back: `self.rows = [padding]`."""
    init = storing.cls.methods.get("__init__") if storing.cls is not None else None
    given = assignments(init) if init is not None else ()
    first = [value for target, value in given if getattr(target, "attr", "") == attribute]
    return bool(first) and all(
        ast.unparse(value) in EMPTY
        or last_part(getattr(value, "func", value)) in ("deque", "OrderedDict", "defaultdict")
        or isinstance(value, ast.ListComp | ast.DictComp)
        for value in first
    )


def _has_one_at_most(storing: Function, attribute: str) -> bool:
    """It is filled at birth, or where it is empty: `if not self.lanes: self.lanes.append(...)`."""
    asks = any(
        isinstance(node, ast.Attribute) and node.attr == attribute
        for statement in storing.statements
        if isinstance(statement, ast.If)
        if not isinstance(statement.test, ast.Compare)  # `if key not in self.lanes:`
        for node in walk(statement.test)
    )
    return not _has_a_loop(storing) and (asks or storing.name == "__init__")
