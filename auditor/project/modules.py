"""Modules, classes and functions by name, parsed only when something asks for them."""

import ast
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from auditor.ir.graph import Graph
from auditor.ir.lower import lower
from auditor.ir.scope import FunctionNode
from auditor.source.newer_syntax import in_older_syntax

CALL = re.compile(r"(?<!\w)(\w++)[ \t]*+\(")


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

    @property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]

    @property
    def graph(self) -> Graph:
        """The flow graph, lowered once. Raises `ir.graph.TooLarge`."""
        if self._graph is None:
            self._graph = lower(self.node)
        return self._graph

    @property
    def calls(self) -> list[ast.Call]:
        """Its own calls in source order; those of functions and classes nested in it are theirs."""
        if self._calls is None:
            self._calls = list(_own_calls(self.node))
        return self._calls

    @property
    def text(self) -> str:
        """Its source lines; for a module's own statements the whole file."""
        if isinstance(self.node, ast.Module):
            return self.module.text
        return "\n".join(self.module.lines[self.node.lineno - 1 : self.node.end_lineno])

    @property
    def decorators(self) -> tuple[str, ...]:
        """Last names of the decorators: `contextmanager`, `property`."""
        nodes = getattr(self.node, "decorator_list", [])
        return tuple(_last_name(node.func if isinstance(node, ast.Call) else node) for node in nodes)

    @property
    def parameters(self) -> tuple[str, ...]:
        if isinstance(self.node, ast.Module):
            return ()
        args = self.node.args
        return tuple(arg.arg for arg in (*args.posonlyargs, *args.args))

    @property
    def is_method(self) -> bool:
        return self.cls is not None and self.parent is None

    @property
    def is_static(self) -> bool:
        return "staticmethod" in self.decorators

    @property
    def is_context_manager(self) -> bool:
        return any(name in ("contextmanager", "asynccontextmanager") for name in self.decorators)

    @property
    def is_abstract(self) -> bool:
        """No body of its own: an interface's promise."""
        if "abstractmethod" in self.decorators:
            return True
        body = self.node.body if isinstance(self.node.body, list) else [self.node.body]
        return all(_says_nothing(statement) for statement in body)

    def __repr__(self) -> str:
        return f"{self.module.path}:{self.qualname}"


def _own_calls(function: FunctionNode) -> Iterator[ast.Call]:
    stack: list[ast.AST] = (
        list(reversed(function.body)) if isinstance(function.body, list) else [function.body]
    )
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Call):
            yield node
        children: list[ast.AST] = []
        for value in node.__dict__.values():  # ast.iter_child_nodes, five times as fast
            if isinstance(value, ast.AST):
                children.append(value)
            elif isinstance(value, list):
                children.extend(item for item in value if isinstance(item, ast.AST))
        stack.extend(reversed(children))


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


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@dataclass(slots=True, eq=False)
class Class:
    module: "Module"
    qualname: str
    node: ast.ClassDef
    methods: dict[str, Function] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]

    def __repr__(self) -> str:
        return f"{self.module.path}:{self.qualname}"


@dataclass(slots=True, eq=False)
class Module:
    path: str
    text: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    assigned: dict[str, ast.expr] = field(default_factory=dict)
    by_node: dict[int, Function] = field(default_factory=dict)
    _lines: list[str] | None = None
    _called: list[tuple[int, str]] | None = None

    @property
    def called(self) -> list[tuple[int, str]]:
        """(line, last name) of everything that looks like a call in the text."""
        if self._called is None:
            self._called = [
                (number, name)
                for number, line in enumerate(self.lines, 1)
                if "(" in line
                for name in CALL.findall(line)
            ]
        return self._called

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
            self._lines = self.text.splitlines()
        return self._lines

    @property
    def package(self) -> list[str]:
        """Dotted parts of the package that relative imports start from."""
        return self.path.removesuffix(".py").split("/")[:-1]


def read_module(path: str, text: str, tree: ast.Module) -> Module:
    module = Module(path, text, tree)
    body = Function(module, "<module>", tree)
    module.functions["<module>"] = body
    module.by_node[id(tree)] = body
    _Collector(module).statements(tree.body, "", None, None)
    return module


class _Collector:
    """Finds definitions and imports, statement by statement; expressions are only searched for lambdas."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def statements(
        self, body: Iterable[ast.stmt], prefix: str, cls: Class | None, parent: Function | None
    ) -> None:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._function(node, prefix, cls, parent)
                case ast.ClassDef():
                    self._class(node, prefix)
                case ast.Import() | ast.ImportFrom():
                    self.module.imports.update(imported_names(node, self.module.package))
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as value):
                    self._lambda(name, value, prefix, cls, parent)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if parent is None and cls is None:
                    self.module.assigned.setdefault(name, value)
                case _:
                    for block in _blocks(node):
                        self.statements(block, prefix, cls, parent)

    def _function(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        prefix: str,
        cls: Class | None,
        parent: Function | None,
    ) -> None:
        qualname = prefix + node.name
        function = Function(self.module, qualname, node, cls, parent)
        self.module.by_node[id(node)] = function
        self.module.functions.setdefault(qualname, function)
        if parent is not None:
            parent.nested.setdefault(node.name, function)
        elif cls is not None:
            if node.name in cls.methods and "setter" in function.decorators:
                cls.methods[node.name + "="] = function
            else:
                cls.methods[node.name] = function
        self.statements(node.body, qualname + ".", cls, function)
        for parameter, default in _defaults(node.args):
            if isinstance(default, ast.Lambda):
                self._lambda(parameter, default, qualname + ".", cls, function)

    def _lambda(
        self, name: str, node: ast.Lambda, prefix: str, cls: Class | None, parent: Function | None
    ) -> None:
        """`take = lambda: ...` is a function called take."""
        function = Function(self.module, prefix + name, node, cls if parent is not None else None, parent)
        self.module.by_node[id(node)] = function
        if parent is not None:
            parent.nested.setdefault(name, function)
        elif cls is None:
            self.module.functions.setdefault(function.qualname, function)

    def _class(self, node: ast.ClassDef, prefix: str) -> None:
        cls = Class(self.module, prefix + node.name, node)
        self.module.classes.setdefault(cls.qualname, cls)
        self.statements(node.body, cls.qualname + ".", cls, None)


def _defaults(args: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    positional = [*args.posonlyargs, *args.args]
    for arg, default in zip(reversed(positional), reversed(args.defaults), strict=False):
        yield arg.arg, default
    for arg, keyword_default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield arg.arg, keyword_default


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if block:
            yield block
    for handler in getattr(node, "handlers", ()):
        yield handler.body
    for case in getattr(node, "cases", ()):
        yield case.body


def imported_names(node: ast.Import | ast.ImportFrom, package: list[str]) -> dict[str, str]:
    """Local name to dotted name; relative imports become absolute from the file's own folders."""
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
            for alias in node.names
        }
    base = node.module or ""
    if node.level:
        above = package[: len(package) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    return {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}


class Project:
    """All sources, parsed on demand. `sources` maps paths with forward slashes to text."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = sources
        self.failed: dict[str, tuple[int, str]] = {}
        self._modules: dict[str, Module | None] = {}
        self._by_suffix: dict[str, list[str]] | None = None

    def module(self, path: str) -> Module | None:
        """The parsed module; None where it could not be parsed (noted in `failed`)."""
        if path not in self._modules:
            self._modules[path] = self._parse(path)
        return self._modules[path]

    def parsed(self) -> list[Module]:
        return [module for _, module in sorted(self._modules.items()) if module is not None]

    def _parse(self, path: str) -> Module | None:
        text = self.sources[path]
        try:
            return read_module(path, text, _syntax_tree(text))
        except SyntaxError as error:
            self.failed[path] = (error.lineno or 0, f"invalid syntax: {error.msg}")
        except ValueError as error:
            self.failed[path] = (0, f"cannot be parsed: {error}")
        except (RecursionError, MemoryError):
            self.failed[path] = (0, "nested too deeply to be parsed")
        return None

    def find_module(self, dotted: str, importer: str) -> Module | None:
        """The project's file for a dotted module name; the one nearest to the importer if several end so."""
        if self._by_suffix is None:
            self._by_suffix = _suffixes(self.sources)
        paths = self._by_suffix.get(dotted)
        if not paths:
            return None
        return self.module(max(paths, key=lambda path: (_shared_prefix(path, importer), -len(path), path)))

    def lookup(self, dotted: str, importer: str, depth: int = 0) -> Function | Class | Module | None:
        """What a dotted name means, through packages, re-exports and aliases."""
        if depth > 8:
            return None
        whole = self.find_module(dotted, importer)
        if whole is not None:
            return whole
        parts = dotted.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module = self.find_module(".".join(parts[:cut]), importer)
            if module is not None:
                return self.member(module, parts[cut:], depth + 1)
        return None

    def member(self, module: Module, parts: list[str], depth: int = 0) -> Function | Class | Module | None:
        """`parts` as seen from inside a module."""
        qualname = ".".join(parts)
        found = module.classes.get(qualname) or module.functions.get(qualname)
        if found is not None:
            return found
        target = module.imports.get(parts[0])
        if target is not None:
            return self.lookup(".".join([target, *parts[1:]]), module.path, depth + 1)
        value = module.assigned.get(parts[0])
        if isinstance(value, (ast.Name, ast.Attribute)) and depth < 8:
            aliased = dotted_name(value)
            if aliased is not None and aliased[0] != parts[0]:
                return self.member(module, [*aliased, *parts[1:]], depth + 1)
        return None


def _syntax_tree(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        older = in_older_syntax(text)
        if older is None:
            raise
        return ast.parse(older)


def dotted_name(node: ast.expr) -> list[str] | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return [node.id, *reversed(parts)]


def _suffixes(paths: Iterable[str]) -> dict[str, list[str]]:
    """Every dotted name that a file could be imported by."""
    found: dict[str, list[str]] = {}
    for path in paths:
        parts = path.removesuffix(".py").split("/")
        if parts[-1] == "__init__":
            parts.pop()
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(path)
    return found


def _shared_prefix(path: str, other: str) -> int:
    count = 0
    for one, two in zip(path.split("/"), other.split("/"), strict=False):
        if one != two:
            break
        count += 1
    return count
