"""A flow graph as text, one node a line, for tests and for looking at what the analysis sees."""

from dataclasses import fields

from auditor.ir.graph import Graph
from auditor.ir.ops import Edge, Op


def dump(graph: Graph) -> str:
    lines = []
    for number, op in enumerate(graph.ops):
        arrows = ", ".join(
            f"{target}" if edge is Edge.NORMAL else f"{target} on {edge.name.lower()}"
            for target, edge in graph.successors[number]
        )
        lines.append(f"{number}: {describe(op)}" + (f"  -> {arrows}" if arrows else ""))
    return "\n".join(lines)


def describe(op: Op) -> str:
    shown = []
    for field in fields(op):
        value = getattr(op, field.name)
        if field.name in ("at", "names", "function") or value in (None, (), False):
            continue
        shown.append(f"{field.name}={_text(value)}")
    return f"{type(op).__name__} " + " ".join(shown)


def _text(value: object) -> str:
    if isinstance(value, tuple) and value and all(isinstance(part, str) for part in value):
        return "".join(value)
    return str(value)
