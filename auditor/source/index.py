"""What is known of every file from its bytes and its stdlib syntax tree, without flow analysis."""

import ast
import gc

from auditor.source.class_reader import read_classes
from auditor.source.entries import ClassIndex, FileIndex, LargeAllocation, PoolImport, Source
from auditor.source.imports import origins, pool_imports, renames
from auditor.source.outline import outline
from auditor.source.vocabulary import Need, count_lines, prefilter

__all__ = [
    "ClassIndex",
    "FileIndex",
    "LargeAllocation",
    "Need",
    "PoolImport",
    "index_bytes",
    "index_file",
    "prefilter",
]


def index_bytes(path: str, data: bytes, text: str | None = None) -> FileIndex:
    """Index one file, parsing no more of it than its bytes call for; `text` where it is decoded already."""
    need = prefilter(data)
    if need is Need.NOTHING:
        return FileIndex(path, count_lines(data))
    return index_file(path, data.decode("utf-8", "replace") if text is None else text, need)


def index_file(path: str, text: str, need: Need = Need.WHOLE) -> FileIndex:
    """Index decoded text. Raises SyntaxError, ValueError, RecursionError or MemoryError where it cannot be parsed.

    `need` is WHOLE for every file whose pool use matters: what the flow analysis follows, and what the
    pre-filter says names a pool.
    """
    lines = text.count("\n") + (not text.endswith("\n") if text else 0)
    if need is Need.NOTHING:
        return FileIndex(path, lines)
    text = text.removeprefix("\ufeff")
    tree, whole = _parse(text, need)
    source = Source(path, tuple(text.split("\n")), tree)
    names = origins(source)
    classes = sorted(read_classes(source, names, whole), key=lambda each: each.span)
    return FileIndex(
        path=path,
        lines=lines,
        pool_imports=pool_imports(source) if whole else (),
        uses_pool=whole and _uses_pool(tree),
        classes=tuple(classes),
        renames=renames(source),
    )


def _parse(text: str, need: Need) -> tuple[ast.Module, bool]:
    """The tree, and whether it is the whole file's. A cut that does not parse is answered by the whole file."""
    collecting = gc.isenabled()
    gc.disable()  # a syntax tree holds no cycles; collecting while it grows costs an eighth of the time
    try:
        if need is Need.MODULES and (reduced := outline(text)) is not None:
            try:
                return ast.parse(reduced), False
            except SyntaxError:
                pass
        return ast.parse(text), need is Need.WHOLE
    finally:
        if collecting:
            gc.enable()


def _uses_pool(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Attribute) and "memory_pool" in node.attr for node in ast.walk(tree))
