"""Modules, classes and functions: what the analysis knows of each."""

import ast
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from auditor.ir.graph import Graph
from auditor.ir.lower import lower
from auditor.ir.scope import FunctionNode
from auditor.ir.tables import is_table
from auditor.source.load import lines_of
from auditor.source.nodes import LEAVES, children, statements_below, walk

if TYPE_CHECKING:
    from auditor.project.shapes.field_work import FieldWork

Kind = TypeVar("Kind", bound=ast.AST)

DEVICE = frozenset({"kernel", "jit", "prim_func"})
"""Decorators of what a compiler reads and Python never runs."""

_CALL_BACKWARDS = re.compile(r"\([ \t]*+(\w++)")
_NESTED = (ast.stmt, ast.excepthandler, ast.match_case)
_SCOPES = frozenset((ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef))


DEFINING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(slots=True, eq=False)
class Function:
    """A def, a lambda's stand-in, or a module's own statements (`qualname` `<module>`)."""

    module: "Module"
    qualname: str
    node: FunctionNode
    cls: "Class | None" = None
    parent: "Function | None" = None
    nested: dict[str, "Function"] = field(default_factory=dict)
    _graph: Graph | None = None
    _calls: list[ast.Call] | None = None
    _nodes: list[ast.AST] | None = None
    _kinds: dict[type[ast.AST], list[ast.AST]] | None = None
    _statements: list[ast.stmt] | None = None
    _dropped: frozenset[ast.Call] | None = None
    _called: dict[str, list[ast.Call]] | None = None
    _worded: list[tuple[ast.stmt, list[ast.Call]]] | None = None
    _abstract: bool | None = None
    _text: str | None = None
    field_work: "FieldWork | None" = None
    """What it does to fields, once somebody asked."""
    assigned: list[tuple[ast.expr, ast.expr]] | None = None
    """Its targets with their values, once somebody asked."""
    of_first: bool = False
    """A plain function seen as a method of what it is told first: `rent_tile(pool)`."""
    is_plain: bool = False
    """A plain function seen as a method of a class: whoever asks for it does so by its bare name."""
    name: str = field(init=False)
    parameters: tuple[str, ...] = field(init=False)
    decorators: tuple[str, ...] = field(init=False)
    """Last names of the decorators: `contextmanager`, `property`."""

    def __post_init__(self) -> None:
        """Each is asked for hundreds of times, and was 4 % of the analysis of a pool-heavy project."""
        self.name = self.qualname.rpartition(".")[2]
        args = None if isinstance(self.node, ast.Module) else self.node.args
        self.parameters = tuple(arg.arg for arg in (*args.posonlyargs, *args.args)) if args else ()
        nodes = getattr(self.node, "decorator_list", [])
        self.decorators = tuple(
            last_part(node.func if isinstance(node, ast.Call) else node) for node in nodes
        )

    @property
    def graph(self) -> Graph:
        """The flow graph, lowered once. Raises `ir.graph.TooLarge`."""
        if self._graph is None:
            self._graph = lower(self.node, self.cls.tables if self.cls is not None else frozenset())
        return self._graph

    @property
    def calls(self) -> list[ast.Call]:
        """Its own calls in source order; those of functions and classes nested in it are theirs."""
        if self._calls is None:
            self._calls = list(_own_calls(self.node))
        return self._calls

    @property
    def body(self) -> list[ast.stmt]:
        """Its own block; a lambda has none."""
        return [] if isinstance(self.node, ast.Lambda) else self.node.body

    @property
    def statements(self) -> list[ast.stmt]:
        """Its statements in source order; those of functions and classes nested in it are theirs."""
        if self._statements is None:
            self._statements = list(statements_below(self.node))
        return self._statements

    @property
    def dropped(self) -> frozenset[ast.Call]:
        """Its calls that stand by themselves: nobody gets what they answer."""
        if self._dropped is None:
            alone = (each.value for each in self.statements if isinstance(each, ast.Expr))
            self._dropped = frozenset(each for each in alone if isinstance(each, ast.Call))
        return self._dropped

    @property
    def worded(self) -> list[tuple[ast.stmt, list[ast.Call]]]:
        """Its statements, and the calls in each one's own expressions, lambdas included."""
        if self._worded is None:
            self._worded = [(each, list(_calls_of(each))) for each in self.statements]
        return self._worded

    @property
    def nodes(self) -> list[ast.AST]:
        """Its def and every node below it, gathered once; operators and contexts are left out."""
        if self._nodes is None:
            self._nodes = list(walk(self.node))
        return self._nodes

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        """Those of its nodes that are of one kind, in their order."""
        if self._kinds is None:
            self._kinds = {}
            for node in self.nodes:
                self._kinds.setdefault(node.__class__, []).append(node)
        return cast("list[Kind]", self._kinds.get(kind, []))

    def calling(self, name: str) -> Sequence[ast.Call]:
        """The calls below it of what has this last name, in the order of its nodes; of a module only its own:
        its functions ask for themselves."""
        if self._called is None:
            self._called = {}
            for call in self.calls if isinstance(self.node, ast.Module) else self.of_kind(ast.Call):
                self._called.setdefault(last_part(call.func), []).append(call)
        return self._called.get(name, ())

    @property
    def text(self) -> str:
        """Its source lines; for a module's own statements the whole file."""
        if isinstance(self.node, ast.Module):
            return self.module.text
        if self._text is None:
            self._text = "\n".join(self.module.lines[self.node.lineno - 1 : self.node.end_lineno])
        return self._text

    @property
    def own_text(self) -> str:
        """Its source lines; of a module without those of its functions and classes."""
        if not isinstance(self.node, ast.Module):
            return self.text
        own = (each for each in self.node.body if not isinstance(each, DEFINING))
        return "\n".join(
            line for each in own for line in self.module.lines[each.lineno - 1 : each.end_lineno]
        )

    @property
    def own_nodes(self) -> Iterator[ast.AST]:
        """Its nodes; of a module without those of its functions and classes."""
        if not isinstance(self.node, ast.Module):
            yield from self.nodes
            return
        for each in self.node.body:
            if not isinstance(each, DEFINING):
                yield from walk(each)

    @property
    def is_method(self) -> bool:
        return self.cls is not None and self.parent is None

    @property
    def owner(self) -> str | None:
        """The name of the object whose method it is: `self`."""
        own = self.of_first or (self.is_method and not self.is_static)
        return self.parameters[0] if own and self.parameters else None

    @property
    def is_static(self) -> bool:
        return "staticmethod" in self.decorators

    @property
    def is_property(self) -> bool:
        return not {"property", "cached_property"}.isdisjoint(self.decorators)

    @property
    def is_context_manager(self) -> bool:
        return any(name in ("contextmanager", "asynccontextmanager") for name in self.decorators)

    @property
    def runs_on_device(self) -> bool:
        """`@cute.kernel`, `@triton.jit`: compiled for a device, whose blocks end with all their memory."""
        around = self.parent is not None and self.parent.runs_on_device
        return around or not DEVICE.isdisjoint(self.decorators)

    @property
    def is_abstract(self) -> bool:
        """No body of its own: an interface's promise."""
        if self._abstract is None:
            body = self.node.body if isinstance(self.node.body, list) else [self.node.body]
            promised = "abstractmethod" in self.decorators
            self._abstract = promised or all(_says_nothing(statement) for statement in body)
        return self._abstract

    def __repr__(self) -> str:
        return f"{self.module.path}:{self.qualname}"


def called_in(text: str) -> list[str]:
    """Last names of everything that looks like a call, in their order. The text is read from its end, where
    the bracket comes first: a pattern that begins with a literal is found seven times as fast."""
    return [name[::-1] for name in reversed(_CALL_BACKWARDS.findall(text[::-1]))]


def _own_calls(function: FunctionNode) -> Iterator[ast.Call]:
    stack: list[ast.AST] = (
        list(reversed(function.body)) if isinstance(function.body, list) else [function.body]
    )
    while stack:
        node = stack.pop()
        if type(node) in _SCOPES:
            continue
        if isinstance(node, ast.Call):
            yield node
        if node.__class__ not in LEAVES:
            below = children(node)
            below.reverse()
            stack += below


def _calls_of(statement: ast.stmt) -> Iterator[ast.Call]:
    """Those of its own expressions; statements within it come by themselves."""
    waiting: list[ast.AST] = [child for child in children(statement) if not isinstance(child, _NESTED)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node
        if node.__class__ not in LEAVES:
            waiting += children(node)  # an expression has no statement below it


def _says_nothing(statement: ast.AST) -> bool:
    match statement:
        case ast.Pass():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Raise(
            exc=ast.Call(func=ast.Name(id="NotImplementedError")) | ast.Name(id="NotImplementedError")
        ):
            return True
    return False


def last_part(node: ast.AST) -> str:
    """`c` of `a.b.c` and of `c`; nothing of what has no name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _fields_of_dicts(methods: Iterable[Function]) -> frozenset[str]:
    given, others = set[str](), set[str]()
    for method in methods:
        for node in method.statements if method.parameters else ():
            match node:
                case ast.Assign(targets=targets, value=value):
                    pass
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    targets = [target]
                case _:
                    continue
            for target in (each for whole in targets for each in getattr(whole, "elts", [whole])):
                match target:
                    case ast.Attribute(value=ast.Name(id=owner), attr=field) if owner == method.parameters[0]:
                        (given if is_table(value) else others).add(field)
    return frozenset(given - others)


@dataclass(slots=True, eq=False)
class Class:
    module: "Module"
    qualname: str
    node: ast.ClassDef
    methods: dict[str, Function] = field(default_factory=dict)
    _text: str | None = None
    _tables: frozenset[str] | None = None

    @property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]

    @property
    def tables(self) -> frozenset[str]:
        """Its fields that are given dicts and nothing else."""
        if self._tables is None:
            self._tables = _fields_of_dicts(self.methods.values())
        return self._tables

    @property
    def text(self) -> str:
        """Its source lines, decorators left out."""
        if self._text is None:
            self._text = "\n".join(self.module.lines[self.node.lineno - 1 : self.node.end_lineno])
        return self._text

    def __repr__(self) -> str:
        return f"{self.module.path}:{self.qualname}"


@dataclass(slots=True, eq=False)
class Module:
    path: str
    text: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)  # modules of which everything is imported
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    assigned: dict[str, ast.expr] = field(default_factory=dict)
    written: list[tuple[int, str]] = field(default_factory=list)  # calls that its text says in other words
    by_node: dict[int, Function] = field(default_factory=dict)
    _lines: list[str] | None = None
    _called: list[tuple[int, str]] | None = None
    _makers: dict[str, list[tuple[Function, ast.Call]]] | None = None

    @property
    def called(self) -> list[tuple[int, str]]:
        """(line, last name) of everything that looks like a call in the text."""
        if self._called is None:
            self._called = [
                (number, name)
                for number, line in enumerate(self.lines, 1)
                if "(" in line
                for name in called_in(line)
            ] + self.written
        return self._called

    def makers(self, name: str) -> list[tuple["Function", ast.Call]]:
        """Calls of a bare name, with the functions that make them."""
        if self._makers is None:
            self._makers = {}
            for function in self.by_node.values():
                for call in function.calls:
                    if isinstance(call.func, ast.Name):
                        self._makers.setdefault(call.func.id, []).append((function, call))
        return self._makers.get(name, [])

    def functions_at(self, lines: Iterable[int]) -> list["Function"]:
        """The functions that these lines lie in, enclosing ones included, in source order."""
        wanted = sorted(set(lines))
        found = []
        for function in self.by_node.values():
            first, last = (
                getattr(function.node, "lineno", 1),
                getattr(function.node, "end_lineno", len(self.lines)),
            )
            index = bisect_left(wanted, first)
            if index < len(wanted) and wanted[index] <= (last or first):
                found.append(function)
        return sorted(found, key=lambda f: (getattr(f.node, "lineno", 0), f.qualname))

    @property
    def lines(self) -> list[str]:
        if self._lines is None:
            self._lines = lines_of(self.text)
        return self._lines

    @property
    def package(self) -> list[str]:
        """Dotted parts of the package that relative imports start from."""
        return self.path.removesuffix(".py").split("/")[:-1]
