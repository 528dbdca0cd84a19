"""Fields of objects that a function is given, `request.row = rows.assign()`: never ended where nothing in the
tree does more with a field so named than work with what is there."""

import ast
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cached_property

from auditor.flow.places import METADATA
from auditor.ir.calls import LOGGING
from auditor.ir.ops import Path
from auditor.project.code.bindings import assignments, awaited, given_to, own_attribute
from auditor.project.code.modules import Function, Module
from auditor.project.code.project import Project
from auditor.project.code.release_names import ENDING, looks_releasing
from auditor.project.fields.filling_again import found_in_a_table
from auditor.project.fields.items_again import items_of
from auditor.project.shapes.made_new import OF_ARRAYS
from auditor.source.nodes import walk

ASKING = frozenset({"len", "int", "str", "repr", "print", "isinstance", "bool", "type", "range"}) | LOGGING
PREDICATE = re.compile(r"_*(?:is|has|can|should|needs)_")
"""Names of what answers yes or no."""

TAKING = frozenset({"pop", "popleft", "popitem", "get", "items", "values", "copy"})


OUT = frozenset({"pop", "popleft", "get_nowait"})

Borrowed = Callable[[Function, ast.Call, ast.AST], bool]
"""Whether a call in that function, of something that the tree defines, only works with this argument."""

Aside = Callable[[Function], Set[int]]
"""Expressions of that function which are not asked for, though they go by the field's name."""


def given_field(function: Function, places: Iterable[Path]) -> Path | None:
    """The place, if this is a field of what the function was given, or found in a container of its object,
    and so are the others."""
    held = set(places)
    given = [place for place in held if len(place) == 2 and _is_anothers(function, place[0])]
    if len(given) != 1 or given[0][0] == function.owner or len({place[-1] for place in held}) != 1:
        return None
    return given[0] if given[0][1].startswith(".") else None


def _is_anothers(function: Function, name: str) -> bool:
    known = name in function.parameters or found_in_a_table(function, name) is not None
    known = known or is_made_by_its_own(function, name) or _is_taken_out(function, name)
    return known or bool(items_of(function, name)) or _is_among_given(function, name)


def _is_among_given(function: Function, name: str) -> bool:
    """`for route in ticket.routes:`, of a ticket that it was given."""
    over = [loop.iter for loop in function.statements if isinstance(loop, ast.For | ast.AsyncFor)
            if getattr(loop.target, "id", "") == name]  # fmt: skip
    told = set(function.parameters) - {function.owner}
    root = _root(over[0]) if len(over) == 1 else None
    return root is not None and root is not over[0] and getattr(root, "id", "") in told


def _root(value: ast.expr) -> ast.expr:
    """`ticket` of `list(ticket.routes.values())`"""
    match value:
        case ast.Attribute(value=inner) | ast.Subscript(value=inner):
            return _root(inner)
        case ast.Call(func=ast.Name(), args=[inner]) | ast.Call(func=ast.Attribute(value=inner), args=[]):
            return _root(inner)
    return value


def _is_taken_out(function: Function, name: str) -> bool:
    """Of a container of its object, or seen there: `job = self.jobs.pop(0)`, `job = self.jobs[0]`, `_, job =
    heappop(self.jobs)`."""
    own = function.owner or ""
    return any(_is_out_of_its_own(awaited(value), own) for value in _given(function, name))


def _given(function: Function, name: str) -> Iterator[ast.expr]:
    yield from given_to(function, name)
    for target, value in assignments(function):
        if isinstance(target, ast.Tuple) and any(getattr(each, "id", "") == name for each in target.elts):
            yield value


def _is_out_of_its_own(value: ast.expr, own: str) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[]):
            pass
        case ast.Call(func=ast.Attribute(value=table, attr=way)) if way in OUT:
            pass
        case ast.Call(func=ast.Attribute(attr="heappop") | ast.Name(id="heappop"), args=[table]):
            pass
        case ast.Call(func=ast.Name(id="next"), args=[ast.Call() | ast.GeneratorExp() as among, *_]):
            return any(isinstance(node, ast.expr) and own_attribute(node, own) for node in walk(among))
        case ast.Subscript(value=table, slice=ast.Constant() | ast.UnaryOp()):
            pass
        case _:
            return False
    return own_attribute(table, own) is not None


def is_made_by_its_own(function: Function, name: str) -> bool:
    """`plan = self.plan(counts)`, `draft = super().propose(prefix)`, and never another one."""
    stores = [node for node in function.nodes if getattr(node, "id", "") == name]
    once = sum(isinstance(getattr(node, "ctx", None), ast.Store) for node in stores) == 1
    return once and any(_is_by_its_own(value, function) for value in given_to(function, name))


def _is_by_its_own(value: ast.expr, function: Function) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")))):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Attribute() as whom)) if own_attribute(
            whom, function.owner or ""
        ):
            return True  # `pending = self.window.open_request()`
        case ast.Call(func=func):
            return own_attribute(func, function.owner or "") is not None
    return False


def only_filled(project: Project, table: str) -> bool:
    """Nobody takes anything out of a table so named, or hands on what is there: it is asked for keys, filled
    and emptied."""
    return only_worked_with(project, table, frozenset({"clear"}))


def gathered_only(family: Iterable[Function], table: str) -> bool:
    """The class makes it and appends to it, and does not look into it."""
    for method in family:
        ways = (call.func for call in method.calls if isinstance(call.func, ast.Attribute))
        kept = {id(way.value) for way in ways if way.attr == "append"}
        for node in method.of_kind(ast.Attribute):
            if node.attr == table and isinstance(node.ctx, ast.Load) and id(node) not in kept:
                return False
    return True


def only_worked_with(
    project: Project,
    field: str,
    works: Set[str] = frozenset(),
    borrowed: Borrowed | None = None,
    ends: Set[str] = frozenset(),
    aside: Aside | None = None,
) -> bool:
    """Nobody hands on what is in a field so named, as whoever ends it would have to. `works` are methods of
    it that end nothing, whatever their names say, and `ends` such as end it."""
    named = re.compile(rf"\.{field}\b|[\"']{field}[\"']")
    quoted = re.compile(rf"[\"']{field}[\"']|\bvars\(|\.__dict__\b")  # `getattr(request, "row")`
    read = {module.path: module for module in project.parsed()}
    speaking = [path for path, text in project.mentioning(field) if named.search(text) is not None]
    return all(
        path in read
        and quoted.search(read[path].text) is None
        and only_work(_speaking(read[path], field), field, works, borrowed, ends, aside)
        for path in speaking
    )


def is_returned(function: Function, name: str) -> bool:
    """`return request`, which its caller has as well."""
    returned = (node.value for node in function.statements if isinstance(node, ast.Return))
    return any(isinstance(value, ast.Name) and value.id == name for value in returned)


def is_forgotten(family: Iterable[Function], place: Path, filling: Function) -> bool:
    """Another method of the class works with the field, or gives back other fields of such objects: else
    somebody outside the tree may see to them."""
    others = [each for each in family if each is not filling and each.qualname != "<module>"]
    called = "" if filling.cls is not None else rf"\b{place[0]}"  # functions of a module go by the same name
    named = re.compile(rf"{called}\{place[1]}\b(?!\()")
    return any(named.search(method.text) for method in others) or any(
        own_attribute(argument, owner) is not None
        for method in others
        for call in (method.calls if filling.cls is not None else ())
        if looks_releasing(call)
        for argument in call.args
        for owner in method.parameters[1:]
    )


def _speaking(module: Module, field: str) -> Iterator[Function]:
    """Its functions that do, and the module itself where it does so outside of them."""
    seen: set[int] = set()
    scripts = []
    for each in list(module.by_node.values()):
        if each.qualname == "<module>":
            scripts.append(each)
        elif f".{field}" in each.text:
            seen |= {id(node) for node in each.nodes}
            yield each
    for script in scripts:
        named = (node for node in script.nodes if isinstance(node, ast.Attribute) and node.attr == field)
        if any(id(node) not in seen for node in named):
            yield script


def only_work(
    functions: Iterable[Function],
    field: str,
    works: Set[str] = frozenset(),
    borrowed: Borrowed | None = None,
    ends: Set[str] = frozenset(),
    aside: Aside | None = None,
) -> bool:
    """The same of these."""
    return all(
        Uses(
            each, known=aside(each) if aside else frozenset(), works=works, borrowed=borrowed, ends=ends
        ).only_works(field)
        for each in functions
    )


def _is_a_stretch(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)


def _works_in_place(name: str) -> bool:
    """`x.copy_(request.buffer)`, and not `board.yield_(request.gpu)`."""
    return name.endswith("_") and not keyword.iskeyword(name[:-1]) and not ENDING.search(name)


class Uses:
    """What one function does with the values of its expressions."""

    def __init__(
        self,
        function: Function,
        others: Set[str] = frozenset(),
        known: Set[int] = frozenset(),
        works: Set[str] = frozenset(),
        borrowed: Borrowed | None = None,
        ends: Set[str] = frozenset(),
        tensors: bool = False,
    ) -> None:
        """What is read of `others`, and at the expressions `known`, is not asked for. The methods `works` are
        work, and so is what a call only borrows; `ends` are ends of the pool, `request.handle.let_go()`. What
        `tensors` are added to takes nothing over, as a list may."""
        self.tensors = tensors
        self.function = function
        self.works = works
        self.borrowed = borrowed
        self.ends = ends
        self.others = others
        self.known = known
        self.named: set[str] = set()

    @cached_property
    def parents(self) -> dict[int, ast.AST]:
        return {id(child): node for node in self.function.nodes for child in ast.iter_child_nodes(node)}

    def only_works(self, field: str) -> bool:
        return all(
            self.is_worked_with(node)
            for node in self.function.nodes
            if isinstance(node, ast.Attribute) and node.attr == field and isinstance(node.ctx, ast.Load)
            if getattr(node.value, "id", None) not in self.others and id(node) not in self.known
        )

    def only_works_with(self, name: str) -> bool:
        return all(self.is_worked_with(node) for node in self._reads_of(name) if id(node) not in self.known)

    def is_worked_with(self, node: ast.AST) -> bool:
        """What is read there is asked for, or worked with, and goes nowhere."""
        parent = self.parents.get(id(node))
        match parent:
            case ast.Attribute(attr=attr):
                if f".{attr}" in METADATA:
                    return True
                called = getattr(self.parents.get(id(parent)), "func", None) is parent
                ends = attr in TAKING | self.ends or (ENDING.search(attr) and attr not in self.works)
                return not ends if called else self.is_worked_with(parent)
            case ast.Subscript(value=value, ctx=ctx):
                if value is node:
                    return not isinstance(ctx, ast.Load) or self.is_worked_with(parent)
                return isinstance(ctx, ast.Load) or self._is_filled(parent)
            case ast.Call() if self.borrowed is not None and self.borrowed(self.function, parent, node):
                return True
            case ast.Call(func=ast.Subscript()) if _is_a_stretch(node):
                return True  # `self.experts[n](route.rows[:count])`
            case ast.Call(func=func):
                name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
                return (
                    name in ASKING
                    or PREDICATE.match(name) is not None
                    or _works_in_place(name)
                    or ast.unparse(func).partition(".")[0] in OF_ARRAYS
                )
            case ast.IfExp(test=test) if test is node:
                return True
            case ast.keyword() | ast.BoolOp() | ast.IfExp():
                return self.is_worked_with(parent)
            case ast.AugAssign(value=value):
                return self.tensors and value is node
            case ast.Assign(targets=[ast.Name(id=name)]):
                return all(map(self.is_worked_with, self._reads_of(name)))
            case ast.Tuple(elts=elements):
                name = self._name_beside(parent, elements.index(node)) if node in elements else None
                return name is not None and all(map(self.is_worked_with, self._reads_of(name)))
            case ast.Compare() | ast.UnaryOp() | ast.BinOp() | ast.FormattedValue() | ast.Slice():
                return True
        return isinstance(parent, ast.If | ast.While | ast.Assert | ast.Expr)

    def _name_beside(self, given: ast.Tuple, index: int) -> str | None:
        """What `gate, up = ctx.gate, ctx.up` calls the second one."""
        match self.parents.get(id(given)):
            case ast.Assign(targets=[ast.Tuple(elts=names)]) if len(names) == len(given.elts):
                return getattr(names[index], "id", None)
        return None

    def _is_filled(self, place: ast.Subscript) -> bool:
        """`self.memory[request.row] = x`, and not `self.used[request.row] = False`, which may be an end."""
        match self.parents.get(id(place)):
            case ast.Assign(value=ast.Name() | ast.Constant()):
                return False  # `self.users[request.row] = request`
            case ast.Assign():
                return True
        return False

    def _reads_of(self, name: str) -> list[ast.Name]:
        """None where they have been asked for: `row = row or 0`."""
        new = name not in self.named
        self.named.add(name)
        return [
            node
            for node in self.function.nodes
            if new and isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            if id(node) not in self.known
        ]
