"""Whether a lease came from one pool and went to another: only where both are surely two."""

import ast
import re
from collections.abc import Iterator

from auditor.flow.lifetime import Lifetime
from auditor.flow.spelling import spelt
from auditor.ir.ops import Call, Path
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.protocols.vocabulary import split
from auditor.source.nodes import walk

POOL = re.compile(r"(?:^|\.)[A-Z]\w*(?:Pool|Allocator|Manager)$")
"""Constructors of pools, by their names."""


def differ(recogniser: Recogniser, function: Function, acquire: Call, domain: Lifetime) -> Iterator[int]:
    """Nodes of releases that go to another pool than `acquire` asked."""
    source = acquire.receiver and spelt(function.graph, acquire.receiver)
    if not source or not _hands_out_itself(recogniser, function, acquire):
        return
    for node, release in sorted(domain.releases.items()):
        target = release.pool and spelt(function.graph, release.pool)
        if not target or target == source:
            continue
        if _two_of_a_kind(source, target) or _made_apart(recogniser, function, source, target):
            yield node


def _hands_out_itself(recogniser: Recogniser, function: Function, acquire: Call) -> bool:
    """A wrapper may get its leases from any pool."""
    targets = recogniser.calls.targets(function, acquire.at)[0]
    return not any(target in recogniser.wrappers for target in targets)


def _made_apart(recogniser: Recogniser, function: Function, one: Path, other: Path) -> bool:
    """Both are bound once, to pools that are constructed by two calls."""
    made, made_too = (_constructor(recogniser, function, path) for path in (one, other))
    return made is not None and made_too is not None and made is not made_too


def _constructor(recogniser: Recogniser, function: Function, path: Path) -> ast.Call | None:
    """The call that makes the pool which a local or a field of the own object is bound to."""
    found: list[ast.expr] = []
    if len(path) == 1 and path[0] not in function.graph.parameters:
        for node in function.nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == path[0]:
                    found.append(value)
    elif len(path) == 2 and function.cls is not None and path[:1] == function.parameters[:1]:
        for cls in recogniser.calls.model.lineage(function.cls):
            for node in walk(cls.node):
                match node:
                    case ast.Assign(targets=[ast.Attribute(attr=attr)], value=value) if "." + attr == path[1]:
                        found.append(value)
    made = found[0] if len(found) == 1 else None
    if not isinstance(made, ast.Call) or POOL.search(ast.unparse(made.func)) is None:
        return None
    return made


def _two_of_a_kind(one: Path, other: Path) -> bool:
    """`self.key_pool` and `self.value_pool`: the same owner, the same last word, different first ones.

    `pool` and `self.pool` may be one and the same, and so may `self.pool` and `other.pool`."""
    if one[:-1] != other[:-1] or "[*]" in (one[-1], other[-1]):
        return False
    if one[-1].startswith("[") and other[-1].startswith("["):
        return True  # two entries of one table
    words, others = split(one[-1].lstrip(".@")), split(other[-1].lstrip(".@"))
    if len(words) < 2 or len(others) < 2:
        return False
    return words[-1] == others[-1] or words[:-1] == others[:-1]
