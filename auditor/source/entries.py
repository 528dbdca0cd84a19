"""The data of the index: what one file is known to hold, from its bytes and its stdlib syntax tree."""

import ast
from dataclasses import dataclass
from functools import cache, cached_property

from auditor.model import Span
from auditor.source.lifetime.sighting import Sighting
from auditor.source.load import lines_of


@dataclass(frozen=True, slots=True)
class PoolImport:
    """An import whose module or name contains memory_pool or MemoryPool. `name` is what it binds."""

    name: str
    module: str
    span: Span
    used: bool


@dataclass(frozen=True, slots=True)
class LargeAllocation:
    """A tensor allocated on a module's forward path, and why it is large.

    `shape` is source-level, such as `b, n, h, d`; `bytes` a product by symbol, such as `b*n*h*d*4`.
    `weight` orders them: 3 quadratic in a sequence or huge, 2 four symbols or more, 1 the rest.
    `temporary` is true where it may be pooled: it is made by a factory, stays inside the method and no
    operation that autograd differentiates keeps it.
    """

    operation: str
    shape: str
    bytes: str
    reason: str
    span: Span
    weight: int = 1
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """An object that `__init__` makes, and what it is given. `opaque`: by `*args` or `**kwargs` too."""

    name: str
    span: Span
    positional: int
    keywords: tuple[str, ...] = ()
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class Allocator:
    """A method that hands out tensors; equal digests are equal code but for the names of locals."""

    name: str
    span: Span
    digest: str


@dataclass(frozen=True, slots=True)
class PoolDetail:
    """How a class goes about its pool; only classes that mention one have it.

    `switch_position` counts the parameters of `__init__` after self, None where it goes by keyword only.
    `fallbacks` are raw allocations that stand in for the pool where it is absent or not worth asking.
    `sets` are fields with pool in their names and the methods that set them, `""` for the class's body.
    `calls` are the methods that each method calls on the object itself, `super().f` for a base's f.
    """

    switch_span: Span | None = None
    switch_position: int | None = None
    leases: bool = False
    has_threshold: bool = False
    built: tuple[Built, ...] = ()
    attaches: bool = False
    fallbacks: tuple[Span, ...] = ()
    sets: tuple[tuple[str, str], ...] = ()
    reads: tuple[tuple[str, str], ...] = ()
    calls: tuple[tuple[str, tuple[str, ...]], ...] = ()
    init_span: Span | None = None
    allocators: tuple[Allocator, ...] = ()


@dataclass(frozen=True, slots=True)
class ClassIndex:
    """One class as its own file shows it; `bases` are dotted names resolved through the file's imports.

    `is_module` is what the file alone tells; adoption decides again with the bases of other files.
    `defines_pool`: its methods hand out and take back, so it is a pool and no user of one.
    `serves_tensors`: a pool asked by shape, which a module could use; others count blocks or bytes.
    `keeps_leases`: it stores what it acquires, or a pool of its own, on self.
    `passes_switch`: it hands a memory_pool argument to something it builds.
    """

    name: str
    qualname: str
    span: Span
    bases: tuple[str, ...] = ()
    is_module: bool = False
    is_abstract: bool = False
    has_init: bool = False
    switch: str | None = None
    switch_default: bool | None = None
    acquires: bool = False
    releases: bool = False
    cleans_up: bool = False
    mentions_pool: bool = False
    defines_pool: bool = False
    serves_tensors: bool = False
    keeps_leases: bool = False
    passes_switch: bool = False
    builds: tuple[str, ...] = ()  # classes whose instances it keeps, as dotted names
    allocations: tuple[LargeAllocation, ...] = ()
    detail: PoolDetail | None = None


@dataclass(frozen=True, slots=True)
class FileIndex:
    """One file. `renames` are the names that its imports bind under another name, for re-exports.
    `sightings` are what its tensors may outlive their use by.
    """

    path: str
    lines: int
    pool_imports: tuple[PoolImport, ...] = ()
    uses_pool: bool = False
    classes: tuple[ClassIndex, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    sightings: tuple[Sighting, ...] = ()


@cache
def module_name(path: str) -> str:
    """The dotted name that a file's path suggests: `pkg/a/__init__.py` is `pkg.a`."""
    parts = path.removesuffix(".py").removesuffix(".pyi").strip("/").split("/")
    parts = [part for part in parts if part not in ("", ".", "..")]
    return ".".join(parts[:-1] if parts and parts[-1] == "__init__" else parts)


@dataclass(frozen=True)
class Source:
    """One parsed file, with what turns a node into a span."""

    path: str
    text: str
    tree: ast.Module

    @cached_property
    def lines(self) -> list[str]:
        """Split on demand: of most files nobody asks for a line."""
        return lines_of(self.text)

    def text_of(self, node: ast.ClassDef) -> str:
        """The lines of a class, and of its decorators."""
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        return "\n".join(self.lines[first - 1 : node.end_lineno])

    def span(self, node: ast.stmt | ast.expr, end: ast.stmt | ast.expr | None = None) -> Span:
        last = end or node
        end_line = last.end_lineno or last.lineno
        return Span(
            self.path,
            node.lineno,
            self._column(node.lineno, node.col_offset),
            end_line,
            self._column(end_line, last.end_col_offset or 0),
        )

    def _column(self, line: int, offset: int) -> int:
        # ast counts UTF-8 bytes from 0, editors count characters from 1.
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        if text.isascii():
            return offset + 1
        return len(text.encode("utf-8", "surrogatepass")[:offset].decode("utf-8", "replace")) + 1
