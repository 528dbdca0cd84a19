"""The same question asked twice in a row: who got nothing the first time gets nothing the second."""

import ast
import re
from collections.abc import Iterator

from auditor.ir.graph import Graph
from auditor.ir.ops import RAISING, Call, EndStatement, Lookup, Move, Op, Path, is_temporary

WAITING = re.compile(r"timeout|deadline|wait|retr|random|choice")
"""Words of calls that may have more luck the second time."""

QUIET = (Move, EndStatement, Lookup)
"""What may stand between the two: names are given, and nothing happens."""


def asked_just_before(graph: Graph, site: int) -> Iterator[Path]:
    """Names of what the same call answered right before this one, with nothing between them."""
    second = graph.ops[site] if site >= 0 else None
    if not isinstance(second, Call):
        return
    text = ast.unparse(second.at)
    if WAITING.search(text):
        return
    given: dict[Path, Path] = {}  # where what is moved goes to
    for op in _straight_before(graph, site):
        if isinstance(op, Call) and ast.unparse(op.at) == text:
            name = given.get(op.target, op.target)
            if not is_temporary(name):
                yield name
        elif isinstance(op, Move):
            given[op.source] = given.get(op.target, op.target)
        elif not isinstance(op, QUIET):
            return


def _straight_before(graph: Graph, site: int) -> Iterator[Op]:
    """Backwards, as far as there is one way only."""
    before: dict[int, list[int]] = {}
    for node, onward in enumerate(graph.successors):
        for following, edge in onward:
            if edge not in RAISING:
                before.setdefault(following, []).append(node)
    node = site
    while len(came_from := before.get(node, [])) == 1:
        node = came_from[0]
        yield graph.ops[node]
