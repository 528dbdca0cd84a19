"""Functions that share what their module has, or the function around them, seen as methods of a class: what
is asked of the fields of an object can be asked of that then.

    _idle = []                                class events:
                                                  def __init__(self):
    def hand_in(event):                               self._idle = []
        _idle.append(event)                       def hand_in(self, event):
                                                      self._idle.append(event)
"""

import ast
import textwrap
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from auditor.project.code.modules import Class, Function, Module, last_part

OBJECT = "self"
"""What the functions are told first, when they are seen as methods."""

STORES = frozenset(
    {"deque", "dict", "set", "list", "defaultdict", "OrderedDict", "Counter", "Queue", "LifoQueue",
     "SimpleQueue", "PriorityQueue", "Semaphore", "BoundedSemaphore", "count", "zeros", "full", "ones",
     "bytearray", "WeakSet", "WeakValueDictionary", "WeakKeyDictionary"}
)  # fmt: skip
"""What is made to have something in, or to count by."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The class, and what each of the functions is there."""

    cls: Class
    methods: Mapping[Function, Function]


def is_store(value: ast.expr) -> bool:
    """Of numbers those that a function says to be the module's."""
    match value:
        case ast.List() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.SetComp():
            return True
        case ast.BinOp(left=ast.List()) | ast.Constant(value=int()):
            return True
        case ast.Call(func=func):
            return last_part(func) in STORES
    return False


def sharing(
    module: Module,
    name: str,
    body: Sequence[ast.stmt],
    plain: Sequence[Function],
    kept: Set[str],
    beginning: Sequence[Function] = (),
) -> Shared:
    """These functions as methods of a class `name` that has `kept`, by what the `body` around them gives it;
    those that are its `beginning` begin the object, too."""
    functions = {each.name for each in plain}
    cls = empty_class(module, name)
    begun = [
        statement
        for statement in body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Return)
        and not kept.isdisjoint(_names(statement))
    ]
    rewriter = _AsMethods(kept, functions)
    first = ast.parse("def __init__(): pass").body[0]
    assert isinstance(first, ast.FunctionDef)
    first.body = [statement for each in begun for statement in parsed(module, each)]
    first.body += [ast.Expr(_call(each.name)) for each in beginning]
    cls.methods["__init__"] = method_of(cls, rewriter.method(first))
    seen: dict[Function, Function] = {}
    for function in plain:
        node = function.node
        copied = parsed(module, node) if isinstance(node, ast.stmt) else []
        if copied and isinstance(copied[0], ast.FunctionDef | ast.AsyncFunctionDef):
            method = method_of(cls, rewriter.method(copied[0]), function.qualname)
            cls.methods[function.name] = method
            seen[function] = method
    return Shared(cls, seen)


class _AsMethods(ast.NodeTransformer):
    """`_idle` becomes `self._idle`, and `lend()` becomes `self.lend()`."""

    def __init__(self, kept: Set[str], functions: Set[str]) -> None:
        self.names = kept | functions
        self.hidden: Set[str] = frozenset()

    def method(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef | ast.AsyncFunctionDef:
        self.hidden = _local(node) if node.name != "__init__" else frozenset()  # that gives what is shared
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


def name_of(module: Module) -> str:
    return module.path.rpartition("/")[2].removesuffix(".py")


def empty_class(module: Module, name: str) -> Class:
    return Class(module, name, ast.ClassDef(name, [], [], [], [], lineno=1, end_lineno=1))


def method_of(cls: Class, node: ast.FunctionDef | ast.AsyncFunctionDef, qualname: str = "") -> Function:
    method = Function(cls.module, qualname or f"{cls.name}.{node.name}", node, cls, is_plain=True)
    method._text = ast.unparse(node)
    cls._text = f"{cls._text or ''}\n{method._text}"
    return method


def parsed(module: Module, node: ast.stmt) -> list[ast.stmt]:
    """Its own text, read again: a copy that may be changed, and lies where the first does."""
    decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
    first, last = min([node.lineno, *decorators]), node.end_lineno
    text = textwrap.dedent("\n".join(module.lines[first - 1 : last]))
    try:
        body = ast.increment_lineno(ast.parse(text), first - 1).body
    except SyntaxError:
        return []  # of several statements in one line, or of a text of several lines in a block
    for each in (below for statement in body for below in ast.walk(statement)):
        if isinstance(each, ast.expr | ast.stmt):
            each.col_offset += node.col_offset
            each.end_col_offset = (each.end_col_offset or 0) + node.col_offset
    return body


def _call(name: str) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [], [])


def _names(node: ast.AST) -> Set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
