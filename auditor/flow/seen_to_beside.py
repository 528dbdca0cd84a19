"""What only *perhaps* leads to a lease: whether it may be the lease all the same, and whether somebody else
sees to that one."""

import ast
from collections.abc import Iterator, Mapping, Sequence

from auditor.flow.operands import operands, uses
from auditor.flow.places import begins_with
from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Move, Path, Store
from auditor.protocols.vocabulary import ACQUIRE_WORDS, split
from auditor.source.nodes import walk

CONVERTING = frozenset({"to", "cpu", "cuda"})
"""Methods of a tensor whose result is itself where it is so already."""

COPYING = frozenset({"copy", "clone", "tolist", "tobytes", "numpy", "item"})
"""Methods of memory whose result is other memory, or what stands there."""

_MADE_ANEW = frozenset({"list", "tuple", "sorted", "max", "min", "sum", "bytes"})


def is_seen_to_beside(
    graph: Graph, site: int, places: frozenset[Path], ends: frozenset[int] = frozenset()
) -> bool:
    """What lay at these places may still be ended. The function is named as one that hands on what it takes,
    `alloc_extend`; an object is made of parts of it, `Proxy(lease.start)`; the pool is told of it again,
    `manager.unpin(block)`, whatever that does; or what the acquire was told is written down for a later
    call, `self._by_request[rid] = name`. `ends` are calls that are known to give it back on other ways."""
    acquire = graph.ops[site]
    assert isinstance(acquire, Call)
    given = [*_made_of(graph), *_told_again(graph, acquire, ends)]
    within = any(begins_with(one, other) for g in given for p in places for one, other in ((g, p), (p, g)))
    return within or _hands_on(graph) or _writes_down(graph, acquire)


def _hands_on(graph: Graph) -> bool:
    name = getattr(graph.ops[0].at, "name", "")
    return not ACQUIRE_WORDS.isdisjoint(split(name)[:2])


def _writes_down(graph: Graph, acquire: Call) -> bool:
    told = {path for _, path in operands(acquire) if path != acquire.receiver}
    return any(isinstance(op, Store) and len(op.target) > 1 and op.source in told for op in graph.ops)


def _made_of(graph: Graph) -> Iterator[Path]:
    """What classes are given where objects of them are made: `Proxy(start=lease.start)`."""
    sources = {op.target: op.source for op in graph.ops if isinstance(op, Move)}
    for op in graph.ops:
        if isinstance(op, Call) and op.callee is not None and op.callee[-1].lstrip("._")[:1].isupper():
            for position, operand in operands(op):
                if position != -1:
                    yield sources.get(operand, operand)


def _told_again(graph: Graph, acquire: Call, ends: frozenset[int]) -> Iterator[Path]:
    """What the pool is given by other calls whose answer nobody uses."""
    if acquire.receiver is None:
        return
    used = {path for op in graph.ops for path in uses(op)}
    for node, op in enumerate(graph.ops):
        if not isinstance(op, Call) or op is acquire or op.target in used or node in ends:
            continue
        if op.receiver == acquire.receiver:
            yield from (operand for position, operand in operands(op) if position != -1)


def is_another_thing(value: ast.expr | None, assigned: Mapping[str, Sequence[ast.expr]]) -> bool:
    """Whether what is returned was made of the lease, rather than being it, a part or a view of it:
    `self.model(buffer)[:n]`, `list(entry.values)`, `numbers` of a list that was filled here."""
    match value:
        case ast.Subscript(value=ast.Call() as of):
            return is_another_thing(of, assigned)
        case ast.IfExp(body=one, orelse=other):
            return is_another_thing(one, assigned) or is_another_thing(other, assigned)
        case (
            ast.Call(func=ast.Attribute(value=ast.Name(id="self"))) | ast.List() | ast.ListComp() | ast.Dict()
        ):
            return True
        case ast.Call(func=ast.Attribute(attr=method)) if method in CONVERTING:
            return True  # for whom it is the same, it would be another's to give back from there
        case ast.BinOp(op=ast.Sub() | ast.Mult() | ast.MatMult() | ast.Pow() | ast.FloorDiv()):
            return True  # what was reckoned; `/` may make a path, and `+` a longer list
        case ast.Call(func=ast.Name(id=name)):
            return name in _MADE_ANEW
        case ast.Name(id=name):
            values = assigned.get(name, ())
            return bool(values) and all(is_another_thing(each, {}) for each in values)
        case _:
            return False


def is_an_answer(value: ast.expr | None, function: ast.AST, numbered: bool) -> bool:
    """`rc = work(cores)`, `if rc != 0: return rc`: what is compared with a number or a text, or with
    what else there is to hear, stands for nothing that is lent; a number may be compared with one that is."""
    nodes = list(walk(function)) if isinstance(value, ast.Name) else []
    return _is_a_list_of_findings(value, nodes) or any(
        isinstance(node, ast.Compare)
        and ast.dump(node.left) == ast.dump(value)
        and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.Lt | ast.Gt | ast.LtE | ast.GtE)
        and _is_heard(node.comparators[0], numbered)
        for node in nodes
        if value is not None
    )


def _is_a_list_of_findings(value: ast.expr | None, nodes: Sequence[ast.AST]) -> bool:
    """`if problems: return problems`, and `return []` elsewhere."""
    name = getattr(value, "id", None)
    asked = any(isinstance(node, ast.If) and getattr(node.test, "id", None) == name for node in nodes)
    return asked and any(
        isinstance(node, ast.Return)
        and isinstance(node.value, ast.List | ast.Dict)
        and not _parts(node.value)
        for node in nodes
    )


def _parts(literal: ast.List | ast.Dict) -> Sequence[ast.expr]:
    return literal.elts if isinstance(literal, ast.List) else literal.values


def _is_heard(other: ast.expr, numbered: bool) -> bool:
    match other:
        case ast.Constant(value=int() | float() | str() | bytes()):
            return True
        case ast.Name() | ast.Attribute():
            return not numbered
    return False


def holds_no_number(value: ast.expr | None, assigned: Mapping[str, Sequence[ast.expr]]) -> bool:
    """Whether it is new memory, whatever it was made of: `q @ rows.T`, `(memory[slot].copy(), n)`."""
    match value:
        case ast.Name(id=name):
            values = assigned.get(name, ())
            return bool(values) and all(holds_no_number(each, {}) for each in values)
        case ast.BinOp(op=ast.MatMult()):
            return True
        case ast.Tuple(elts=[_, *_] as parts):
            return all(isinstance(each, ast.Constant) or holds_no_number(each, assigned) for each in parts)
        case ast.Call(func=ast.Attribute(attr=method), args=[], keywords=[]):
            return method in COPYING
    return False


def assigned_in(function: ast.AST) -> dict[str, list[ast.expr]]:
    """What each local name is set to; of lists, what may be put into them as it is."""
    found: dict[str, list[ast.expr]] = {}
    for node in walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found.setdefault(name, []).append(value)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="append"),
                args=[ast.Call(func=ast.Attribute(value=value, attr=method))],
            ) if method in CONVERTING:
                found.setdefault(name, []).append(value)  # who keeps what `to` returns may keep that itself
    return found
