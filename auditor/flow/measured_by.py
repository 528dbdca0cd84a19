"""Lists that say how much is taken: `budget.take(sum(len(p) for p in prompts))` takes nothing where there are
no prompts, so that a loop over the prompts behind it has a turn for whatever is owed."""

import ast
from collections.abc import Iterator

from auditor.flow.as_many import written
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Fresh, Move, Next, Path, is_temporary

MEASURING = frozenset({"len", "sum"})


def measured_by(graph: Graph, site: int) -> frozenset[Path]:
    """Of what the acquire is told, the lists that it was measured from."""
    call = graph.ops[site]
    assert isinstance(call, Call)
    told = [*(path for path, _ in call.args), *(path for _, path in call.kwargs)]
    found = (each for path in told for each in _lists(graph, path))
    return frozenset(path for path in found if len(path) == 1 and written(graph, path) <= 1)


def _lists(graph: Graph, number: Path) -> Iterator[Path]:
    """`len(xs)`, `sum(x.size for x in xs)` and multiples of them, under a name that means nothing else."""
    writers = [op for op in graph.ops if getattr(op, "target", None) == number]
    for op in writers if len(writers) == 1 else ():
        match op:
            case Move(source=source) if source != number:
                yield from _lists(graph, source)
            case Fresh(at=ast.BinOp(op=ast.Mult()), uses=uses):
                for each in uses:
                    yield from _lists(graph, each)
            case Call(at=ast.Call(func=ast.Name(id=name), args=[told]), args=[(first, False)]) if (
                name in MEASURING
            ):
                yield _gone_over(graph, told) if is_temporary(first) else first


def _gone_over(graph: Graph, told: ast.expr) -> Path:
    """What a comprehension has an element for each of; () where that is not so."""
    if not isinstance(told, ast.ListComp | ast.GeneratorExp):
        return ()
    loops = {id(op.at): op.source for op in graph.ops if isinstance(op, Next)}
    first, *others = told.generators
    return loops.get(id(first.target), ()) if not (others or first.ifs) else ()
