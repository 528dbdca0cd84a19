"""What is known of every file from its bytes and its stdlib syntax tree, without flow analysis."""

from dataclasses import dataclass

from auditor.model import Span


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
    """

    operation: str
    shape: str
    bytes: str
    reason: str
    span: Span


@dataclass(frozen=True, slots=True)
class ClassIndex:
    """One class as its own file shows it; `bases` are dotted names resolved through the file's imports."""

    name: str
    qualname: str
    span: Span
    bases: tuple[str, ...] = ()
    is_module: bool = False
    switch: str | None = None
    switch_default: bool | None = None
    acquires: bool = False
    releases: bool = False
    cleans_up: bool = False
    mentions_pool: bool = False
    allocations: tuple[LargeAllocation, ...] = ()


@dataclass(frozen=True, slots=True)
class FileIndex:
    path: str
    lines: int
    pool_imports: tuple[PoolImport, ...] = ()
    uses_pool: bool = False
    classes: tuple[ClassIndex, ...] = ()
