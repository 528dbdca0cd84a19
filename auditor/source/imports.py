"""A file's imports: what each name stands for, and which of them bring in a pool that is then used."""

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator

from auditor.source.entries import PoolImport, Source, module_name
from auditor.source.nodes import HOLDERS, every_node, statements_in

_POOL = re.compile(r"memory_pool|MemoryPool")
_DELIBERATE = re.compile(
    r"#\s*(?:noqa(?!:)|noqa:[^#]*F401|pylint:[^#]*unused-import|isort:\s*skip|re-?export)", re.I
)
_WORD = re.compile(r"\w+")

Import = ast.Import | ast.ImportFrom
_ON_THE_WAY = HOLDERS | {ast.Import, ast.ImportFrom}


def statements(source: Source) -> Iterator[Import]:
    """Every import of the file, those in functions and under conditions included."""
    lines = [number for number, line in enumerate(source.lines, 1) if "import" in line]
    waiting: list[ast.AST] = [source.tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        else:
            below = [child for child in statements_in(node) if type(child) in _ON_THE_WAY]
            waiting += [child for child in below if _reaches(child, lines)]


def _reaches(node: ast.AST, lines: list[int]) -> bool:
    """Whether one of these lines lies in it; where a `case` lies Python does not say."""
    if not isinstance(node, ast.stmt | ast.excepthandler):
        return True
    index = bisect_left(lines, node.lineno)
    return index < len(lines) and lines[index] <= (node.end_lineno or node.lineno)


def origins(source: Source) -> dict[str, str]:
    """What every imported name stands for, as a dotted name; relative imports from the file's own package."""
    package = module_name(source.path).split(".")
    if not source.path.endswith("__init__.py"):
        package = package[:-1]
    found: dict[str, str] = {}
    for node in statements(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                found[bound] = alias.name if alias.asname else bound
        else:
            base = from_module(node, package)
            for alias in node.names:
                found[alias.asname or alias.name] = f"{base}.{alias.name}" if base else alias.name
    return found


def from_module(node: ast.ImportFrom, package: list[str]) -> str:
    """The absolute dotted module that a `from` statement reads."""
    if not node.level:
        return node.module or ""
    kept = package[: len(package) - (node.level - 1)]
    return ".".join([*kept, node.module] if node.module else kept)


def renames(source: Source) -> tuple[tuple[str, str], ...]:
    """`from .x import A as B` in a package's `__init__`: B is known to others only through this line."""
    if not source.path.endswith("__init__.py"):
        return ()
    found = origins(source)
    return tuple(
        sorted((name, dotted) for name, dotted in found.items() if dotted.rpartition(".")[2] != name)
    )


def pool_imports(source: Source) -> tuple[PoolImport, ...]:
    """The imports whose module or name contains memory_pool or MemoryPool, each bound name once a
    statement.
    """
    imported = list(_of_pools(source))
    if not imported:  # as in most files, which then need not be read for what they use
        return ()
    used = _Used(source.tree)
    probes = set(_probes(source.tree))
    package_file = source.path.endswith("__init__.py")
    found: list[PoolImport] = []
    for node, module, alias in imported:
        deliberate = package_file or node in probes or alias.asname == alias.name or _marked(source, node)
        dotted = isinstance(node, ast.Import) and alias.asname is None
        bound = alias.name if dotted else alias.asname or alias.name
        is_used = deliberate or alias.name == "*" or used.dotted(bound)
        found.append(PoolImport(bound, module or alias.name, source.span(node), is_used))
    return tuple(sorted(found, key=lambda each: each.span))


def _of_pools(source: Source) -> Iterator[tuple[Import, str, ast.alias]]:
    """The import statement, the module it reads and the name, for each that speaks of a memory pool."""
    for node in statements(source):
        module = "" if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
        yield from ((node, module, alias) for alias in node.names if _POOL.search(f"{module} {alias.name}"))


class _Used:
    """Which names the file mentions anywhere but in import statements and docstrings."""

    def __init__(self, tree: ast.Module) -> None:
        self.words: set[str] = set()
        self.chains: set[str] = set()
        skip = {id(node.value) for node in every_node(tree) if isinstance(node, ast.Expr)}
        for node in every_node(tree):
            match node:
                case ast.Name(id=name):
                    self.words.add(name)
                case ast.arg(arg=name):
                    self.words.add(name)  # a test's fixture is used by a parameter of its name
                case ast.Attribute():
                    self.chains.add(dotted_text(node) or "")
                case ast.Constant(value=str(text)) if id(node) not in skip and len(text) < 400:
                    self.words.update(_WORD.findall(text))  # annotations in quotes, __all__, getattr

    def dotted(self, name: str) -> bool:
        if "." not in name:
            return name in self.words
        return any(chain == name or chain.startswith(name + ".") for chain in self.chains)


def _probes(tree: ast.Module) -> Iterator[Import]:
    """Imports tried only to see whether they succeed: `try: import x` whose handler catches ImportError."""
    for node in every_node(tree):
        if isinstance(node, ast.Try) and any(_catches_import(handler) for handler in node.handlers):
            for inner in node.body:
                yield from (
                    each for each in every_node(inner) if isinstance(each, ast.Import | ast.ImportFrom)
                )


def _catches_import(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = ast.unparse(handler.type)
    return any(name in names for name in ("ImportError", "ModuleNotFoundError", "Exception"))


def _marked(source: Source, node: Import) -> bool:
    rows = source.lines[node.lineno - 1 : node.end_lineno]
    return any(_DELIBERATE.search(row) for row in rows)


def dotted_text(node: ast.expr) -> str | None:
    """`a.b.c` as text where the expression is nothing but names and attributes."""
    rest = ""
    while isinstance(node, ast.Attribute):
        rest = f".{node.attr}{rest}"
        node = node.value
    return node.id + rest if isinstance(node, ast.Name) else None
