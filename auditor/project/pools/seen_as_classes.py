"""Pools without a class, seen as one: a module whose functions share what it has, and functions that are told
the object first on which they work.

    _idle: list[Event] = []                          @dataclass
                                                     class Ring:
    def lend():                                          free: list[int]
        return _idle.pop() if _idle else None
                                                     def draw(ring: Ring):
    def hand_in(event):                                  return ring.free.pop()
        _idle.append(event)

What is asked of classes can be asked of these then. Nothing but the text ties such functions together, so
that the users of what is found have to say whether it is a pool.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from auditor.flow.effects import Handle
from auditor.project.code.bindings import assigned_by
from auditor.project.code.modules import Class, Function, Module, last_part
from auditor.project.pools.by_belief import ENDING as TAKING_BACK
from auditor.project.pools.halves import Half, Pair
from auditor.project.shapes.full_at_first import BEGINNING
from auditor.project.shapes.pool_state import own_parameters

OBJECT = "self"
"""What functions of a module are told first, when they are seen as methods."""

STORES = frozenset(
    {"deque", "dict", "set", "list", "defaultdict", "OrderedDict", "Counter", "Queue", "LifoQueue",
     "SimpleQueue", "PriorityQueue", "Semaphore", "BoundedSemaphore", "count", "zeros", "full", "ones",
     "bytearray", "WeakSet", "WeakValueDictionary", "WeakKeyDictionary"}
)  # fmt: skip
"""What a module makes to have something in, or to count by."""

NAMED_STATE = re.compile(r"""\.\w+ = (?:["']|[A-Z])|\] = -1(?!\d)""")
"""`slot.state = "idle"`, `slot.state = State.IDLE`, `owner[slot] = -1`"""

PLAIN = frozenset({"str", "int", "float", "bool", "bytes"})
"""Of these no two functions work on the same one."""


@dataclass(frozen=True, slots=True)
class SeenAsClass:
    """The class, and which function each of its methods is; `of_first` where that is told the object,
    `closed` where they are the functions of another one."""

    cls: Class
    functions: Mapping[Function, Function]
    of_first: bool
    closed: bool = False

    def as_functions(self, pair: Pair) -> Pair | None:
        """The pair with the functions themselves for halves, for their users to say whether it is one; None
        where it is one of methods."""
        if not all(half.function in self.functions for half in pair.acquires):
            return None
        acquires, releases = (tuple(map(self._as_function, side)) for side in (pair.acquires, pair.releases))
        sure = self.closed and not pair.proposed  # nobody else gets at what a closure has
        return replace(pair, owner=None, acquires=acquires, releases=releases, proposed=not sure)

    def _as_function(self, half: Half) -> Half:
        function = self.functions.get(half.function)
        if function is None:
            return half
        if half.handle is Handle.RECEIVER:
            handle = Handle.ARGUMENT if self.of_first else Handle.NONE
            return replace(half, function=function, handle=handle, argument=0)
        told, argument = own_parameters(half.function), half.argument
        if self.of_first and isinstance(argument, int) and argument < len(told):
            argument = told[argument]  # it is told the object before that
        return replace(half, function=function, argument=argument)


def seen_as_classes(module: Module, plain: Sequence[Function]) -> Iterator[SeenAsClass]:
    """Of the plain functions of a module, where one of them takes something out or sets something back."""
    if len(plain) < 2 or not any(map(_takes_back, plain)):
        return
    kept = {
        name
        for name, value in module.assigned.items()
        if _is_store(value) and sum(name in each.text for each in plain) > 1
    }
    if kept:
        yield _of_module(module, plain, kept)
    yield from _of_first(module, plain)


def _takes_back(function: Function) -> bool:
    return (TAKING_BACK.search(function.text) or NAMED_STATE.search(function.text)) is not None


# What a module has ------------------------------------------------------------------------------------------


def _is_store(value: ast.expr) -> bool:
    """Of numbers those that a function says to be the module's."""
    match value:
        case ast.List() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.SetComp():
            return True
        case ast.BinOp(left=ast.List()) | ast.Constant(value=int()):
            return True
        case ast.Call(func=func):
            return last_part(func) in STORES
    return False


def _of_module(module: Module, plain: Sequence[Function], kept: Set[str]) -> SeenAsClass:
    return _sharing(module, _name_of(module), module.tree.body, plain, kept)


def seen_in(factory: Function, handed: Sequence[Function]) -> SeenAsClass | None:
    """The functions that one function makes and hands out together: what it has they have in common."""
    body = factory.node.body if isinstance(factory.node, ast.FunctionDef) else []
    kept = {
        target.id
        for statement in body
        for target, value in assigned_by(statement)
        if isinstance(target, ast.Name) and _is_store(value)
    }
    if not kept or not any(map(_takes_back, handed)):
        return None
    return replace(_sharing(factory.module, factory.name, body, handed, kept), closed=True)


def _sharing(
    module: Module, name: str, body: Sequence[ast.stmt], plain: Sequence[Function], kept: Set[str]
) -> SeenAsClass:
    functions = {each.name for each in plain}
    cls = _empty_class(module, name)
    begun = [
        statement
        for statement in body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Return)
        and not kept.isdisjoint(_names(statement))
    ]
    rewriter = _OfModule(kept, functions)
    first = ast.parse("def __init__(): pass").body[0]
    assert isinstance(first, ast.FunctionDef)
    first.body = [statement for each in begun for statement in _parsed(module, each)]
    first.body += [ast.Expr(_call(each.name)) for each in plain if BEGINNING.match(each.name)]
    cls.methods["__init__"] = _method(cls, rewriter.method(first))
    seen: dict[Function, Function] = {}
    for function in plain:
        node = function.node
        copied = _parsed(module, node) if isinstance(node, ast.stmt) else []
        if copied and isinstance(copied[0], ast.FunctionDef | ast.AsyncFunctionDef):
            method = _method(cls, rewriter.method(copied[0]))
            cls.methods[function.name] = method
            seen[method] = function
    return SeenAsClass(cls, seen, of_first=False)


class _OfModule(ast.NodeTransformer):
    """`_idle` becomes `self._idle`, and `lend()` becomes `self.lend()`."""

    def __init__(self, kept: Set[str], functions: Set[str]) -> None:
        self.names = kept | functions
        self.hidden: Set[str] = frozenset()

    def method(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef | ast.AsyncFunctionDef:
        self.hidden = _local(node)
        node.body = [self.visit(statement) for statement in node.body]
        node.args.args.insert(0, ast.arg(OBJECT))
        return ast.fix_missing_locations(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names or node.id in self.hidden:
            return node
        owner = ast.copy_location(ast.Name(OBJECT, ast.Load()), node)
        return ast.copy_location(ast.Attribute(owner, node.id, node.ctx), node)

    def visit_Global(self, node: ast.Global) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node)


def _local(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Set[str]:
    """Its parameters, and what it binds that is not said to be the module's."""
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    shared = {
        name for each in ast.walk(node) if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names
    }
    bound = {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return {each.arg for each in arguments} | (bound - shared)


# What functions are told first ------------------------------------------------------------------------------


def _of_first(module: Module, plain: Sequence[Function]) -> Iterator[SeenAsClass]:
    """By the class that the parameter is said to be of; or else by its name, if it is that of a thing."""
    told: dict[tuple[str, str], list[Function]] = {}
    for function in plain:
        if function.parameters and (said := _said_of_first(function)) not in PLAIN:
            key = (said, "") if said in module.classes else (said, function.parameters[0])
            told.setdefault(key, []).append(function)
    for (said, _), functions in sorted(told.items()):
        if len(functions) > 1 and any(map(_takes_back, functions)):
            yield _as_methods(module, said, functions)


def _said_of_first(function: Function) -> str:
    assert isinstance(function.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    arguments = (*function.node.args.posonlyargs, *function.node.args.args)
    said = arguments[0].annotation
    return ast.unparse(said).strip("'\"") if said is not None else ""


def _as_methods(module: Module, said: str, functions: Sequence[Function]) -> SeenAsClass:
    """Beside those of the class itself, which say how it begins."""
    known = module.classes.get(said)
    name = said if said.isidentifier() and said[:1].isupper() else _name_of(module)
    cls = Class(module, known.qualname, known.node) if known is not None else _empty_class(module, name)
    for name, method in known.methods.items() if known is not None else ():
        cls.methods[name] = replace(method, cls=cls, field_work=None)
    seen: dict[Function, Function] = {}
    for function in functions:
        method = replace(function, cls=cls, field_work=None, is_plain=True)
        cls.methods.setdefault(function.name, method)
        seen[method] = function
    cls._text = "\n".join([known.text if known is not None else "", *map(_with_fields_of_object, functions)])
    return SeenAsClass(cls, seen, of_first=True)


def _with_fields_of_object(function: Function) -> str:
    """Its text with `ring.free`, and `ring["free"]`, as `self.free`."""
    told = re.escape(function.parameters[0])
    text = re.sub(rf"""\b{told}\[["'](\w+)["']\]""", rf"{OBJECT}.\1", function.text)
    return re.sub(rf"\b{told}\.", f"{OBJECT}.", text)


# Syntax -----------------------------------------------------------------------------------------------------


def _name_of(module: Module) -> str:
    return module.path.rpartition("/")[2].removesuffix(".py")


def _empty_class(module: Module, name: str) -> Class:
    return Class(module, name, ast.ClassDef(name, [], [], [], [], lineno=1, end_lineno=1))


def _method(cls: Class, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    method = Function(cls.module, f"{cls.name}.{node.name}", node, cls, is_plain=True)
    method._text = ast.unparse(node)
    cls._text = f"{cls._text or ''}\n{method._text}"
    return method


def _parsed(module: Module, node: ast.stmt) -> list[ast.stmt]:
    """Its own text, read again: a copy that may be changed."""
    decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
    first, last = min([node.lineno, *decorators]), node.end_lineno
    text = textwrap.dedent("\n".join(module.lines[first - 1 : last]))
    try:
        return ast.increment_lineno(ast.parse(text), first - 1).body
    except SyntaxError:
        return []  # of several statements in one line, or of a text of several lines in a block


def _call(name: str) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [], [])


def _names(node: ast.AST) -> Set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
