"""What is known of every file from its bytes and its stdlib syntax tree, without flow analysis."""

import ast

from auditor.source.class_reader import ClassReader
from auditor.source.entries import ClassIndex, FileIndex, LargeAllocation, PoolImport, Source
from auditor.source.imports import origins, pool_imports, renames
from auditor.source.lifetime.read import sightings, suspects
from auditor.source.nodes import every_node
from auditor.source.parse import Parse
from auditor.source.searched import Listed
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
    file = Listed(data)
    need, readers = prefilter(file), suspects(path, file)
    if need is Need.NOTHING and not readers:
        return FileIndex(path, count_lines(data))
    return index_file(path, data.decode("utf-8", "replace") if text is None else text, need, readers)


def index_file(
    path: str,
    text: str,
    need: Need = Need.WHOLE,
    readers: tuple[int, ...] = (),
    parse: Parse = ast.parse,
) -> FileIndex:
    """Index decoded text. Raises SyntaxError, ValueError, RecursionError or MemoryError where it cannot
    be parsed.

    `need` is WHOLE for every file whose pool use matters: what the flow analysis follows, and what the
    pre-filter says names a pool. `readers` are those that look for what outlives its use.
    """
    lines = text.count("\n") + (not text.endswith("\n") if text else 0)
    if need is Need.NOTHING and not readers:
        return FileIndex(path, lines)
    text = text.removeprefix("\ufeff")
    source = Source(path, text, parse(text, path))
    outlived = sightings(source, readers)
    if need is Need.NOTHING:
        return FileIndex(path, lines, sightings=outlived)
    names_pool = need is Need.WHOLE
    classes = ClassReader(source, origins(source), names_pool).classes()
    return FileIndex(
        path=path,
        lines=lines,
        pool_imports=pool_imports(source) if names_pool else (),
        uses_pool=names_pool and "memory_pool" in text and _uses_pool(source.tree),
        classes=tuple(sorted(classes, key=lambda each: each.span)),
        renames=renames(source),
        sightings=outlived,
    )


def _uses_pool(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Attribute) and "memory_pool" in node.attr for node in every_node(tree))
