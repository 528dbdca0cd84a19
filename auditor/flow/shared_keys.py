"""Tables that a loop fills under what several things have in common: `held[len(branch)] = pool.take()`,
`held[text] = pool.take()` of texts that somebody sends.

The second branch of that length takes the place of the first, unless somebody looks at what is there."""

import ast
import re
from collections.abc import Iterable, Iterator

from auditor.flow.operands import operands, uses
from auditor.flow.places import METADATA
from auditor.ir.graph import Graph
from auditor.ir.ops import ANY_ITEM, Assume, Call, EndStatement, Move, Next, Op, Path, Store

LOOKING = frozenset({"get", "pop", "setdefault", "keys", "__contains__"})


CONTENTS = re.compile(
    r"(?:\w+_)?(?:text|prompt|word|token|sentence|line|size|length|width|shape|dtype|value|digest|hash|checksum)"
)
"""Things that may be alike, as against what they are told apart by."""

WANTED = re.compile(
    r"(?:adapter|lora|model|tenant|user|group|kind|bucket|priority|template|language|prefix)(?:_(?:name|id|key|path))?"
)
"""What several requests of a batch want alike."""

REQUESTS = re.compile(r"(?:\w+_)?(?:reqs?|requests?|jobs?|seqs?|sequences?|batch|queries|prompts|messages)")


def stored_under_shared_keys(graph: Graph) -> frozenset[int]:
    """Nodes that put something into a table that no test and no look-up of this function is about."""
    stores = [(node, op) for node, op in enumerate(graph.ops) if isinstance(op, Store)]
    shared = [(node, op) for node, op in stores if _is_shared(graph, _key(op.at))]
    alike = [(node, op) for node, op in stores if _is_content(graph, _key(op.at))]
    return frozenset(node for node, op in shared if not _looked_at(graph.ops, op.target[:-1])) | frozenset(
        node for node, op in alike if not _looked_at(_without_later_uses(graph, op), op.target[:-1])
    )


def _is_content(graph: Graph, key: ast.expr | None) -> bool:
    """A loop's own `text` of `texts`, `w` of `words`, `image.digest`, `req.adapter` of `reqs`, which the
    function is given."""
    match key:
        case ast.Name(id=name):
            sources = _gone_over(graph, name)
            named = any(map(CONTENTS.fullmatch, (name, *map(_one, sources))))
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            sources = _gone_over(graph, name)
            wanted = WANTED.fullmatch(attribute) is not None and all(map(REQUESTS.fullmatch, sources))
            named = wanted or CONTENTS.fullmatch(attribute) is not None
        case _:
            return False
    return named and len(sources) == 1


def _one(several: str) -> str:
    """`text` of `texts`."""
    return several.removesuffix("s")


def _gone_over(graph: Graph, name: str) -> set[str]:
    """Parameters, as they came in, whose elements are what a loop calls by the name; empty where something
    else may be."""
    loops = [op for op in graph.ops if isinstance(op, Next) and op.target[0].split("~")[0] == name]
    sources = {op.source for op in loops}
    written = {op.target for op in graph.ops if isinstance(op, Move | Call)}
    plain = all(len(each) == 1 and each[0] in graph.parameters and each not in written for each in sources)
    return {each[0] for each in sources} if plain else set()


def _without_later_uses(graph: Graph, store: Store) -> Iterator[Op]:
    """What stands behind the store is about what was stored there: `encode(text, held[text])`."""
    line = getattr(store.at, "lineno", 0)
    return (op for op in graph.ops if isinstance(op, Assume) or getattr(op.at, "lineno", 0) <= line)


def _key(at: ast.AST) -> ast.expr | None:
    match at:
        case ast.Subscript(slice=key) | ast.DictComp(key=key):
            return key
    return None


def _is_shared(graph: Graph, key: ast.expr | None) -> bool:
    match key:
        case ast.Name(id=name):
            values = [_given(op, name) for op in graph.ops]
            return any(value is not None and _is_shared(graph, value) for value in values)
        case ast.Attribute(attr=attribute):
            return f".{attribute}" in METADATA
        case ast.Call(func=ast.Name(id="len")) | ast.BinOp(op=ast.Mod()):
            return True
        case ast.Tuple(elts=parts):
            return all(_is_shared(graph, part) for part in parts)
    return False


def _given(op: object, name: str) -> ast.expr | None:
    match op:
        case EndStatement(at=ast.Assign(targets=[ast.Name(id=target)], value=value)) if target == name:
            return None if isinstance(value, ast.Name) else value
    return None


def _looked_at(ops: Iterable[Op], table: Path) -> bool:
    """`if key in table`, `table.get(key)`, `free(table[key])`, `table[len(table)] = ...`."""
    return any(_looks_at(op, table) for op in ops)


def _looks_at(op: Op, table: Path) -> bool:
    if isinstance(op, Assume):
        return table[0] in op.names
    if isinstance(op, Call):
        measured = op.method == "len" and op.args == ((table, False),)
        if measured or (op.receiver == table and op.method in LOOKING):
            return True
    used = (path for _, path in operands(op)) if isinstance(op, Call) else uses(op)
    return any(path == (*table, ANY_ITEM) for path in used)
