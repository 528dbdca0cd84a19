"""What is known where a lease begins: of the object that is asked for it, of the parameters that decide."""

import ast

from auditor.flow.effects import Acquisition, Handle
from auditor.flow.follow import Followed
from auditor.flow.held import Endings
from auditor.flow.knowledge import NOTHING, Knowledge
from auditor.ir.conditions import asks_length
from auditor.ir.graph import Graph
from auditor.ir.ops import Assume, Call
from auditor.project.code.bindings import given_to
from auditor.project.code.modules import Function


def asked(op: Call) -> Knowledge:
    """`lock.acquire()`: there was something to be asked."""
    owner = "".join(op.receiver).lstrip("@") if op.receiver is not None else ""
    return frozenset({(owner, True), (f"{owner} is None", False)}) if owner else NOTHING


def handed_out(graph: Graph, op: Call, acquisition: Acquisition) -> Knowledge:
    """What holds the lease is something, whatever flag says so later: `fits = pages is not None`; but for
    the number 0 that is not true, nor for what came with a key and may be empty."""
    in_result = any(place[:1] == op.target for place in acquisition.places)
    if acquisition.handle is Handle.RESULT and not in_result:
        return NOTHING  # it lies in what the call was given
    given = "".join(op.target)
    some = (f"{given} is None", False)
    is_number = acquisition.from_zero and (acquisition.keyed or op.target in acquisition.places)
    may_be_empty = acquisition.keyed and op.target not in acquisition.places and _is_measured(graph)
    return frozenset({some} if is_number or may_be_empty else {(given, True), some})


def _is_measured(graph: Graph) -> bool:
    """`if len(shard) == 0:`"""
    return any(isinstance(op, Assume) and asks_length(op.at) for op in graph.ops)


def of_receiver(op: Call, acquisition: Acquisition) -> Knowledge:
    """`self._get_buffer()` lends under `if self.pool:`, so the pool is there where there is a lease."""
    owner = "".join(op.receiver).lstrip("@") if op.receiver is not None else ""
    return frozenset((owner + key, truth) for key, truth in acquisition.own if owner)


def missing(function: Function, acquire: ast.Call, known: Knowledge) -> frozenset[str]:
    """Parameters that are None there, by their own name or by one that takes their place: `out = given`,
    and `if out is None: out = pool.take()`."""
    absent = {key.removesuffix(" is None") for key, truth in known if truth and key.endswith(" is None")}
    parameters = function.graph.parameters
    for name in sorted(absent.difference(parameters)):
        match list(given_to(function, name)):
            case [ast.Name(id=given), taken] if taken is acquire:
                absent.add(given)
    return frozenset(absent.intersection(parameters))


def of_parameters(parameters: tuple[str, ...], known: Knowledge) -> Knowledge:
    """Whether they are true, or None, there."""
    return frozenset(fact for fact in known if fact[0].removesuffix(" is None") in parameters)


def always_in_a_table(endings: Endings, own: str | None) -> bool:
    """Wherever it is returned, a container of the method's own object, or of the module, has it as well; not
    where that has only those which the method passed over before, `self.stale.append(row)`, `continue`."""
    tabled = {
        node
        for node, path in endings.beside
        if (path[0] == own and len(path) > 2) or (path[0].startswith("@") and len(path) > 1)
    }
    return (tabled & endings.shared).issuperset(endings.returned)


def flags_beside(graph: Graph, followed: Followed) -> frozenset[tuple[str, bool]]:
    """Items returned beside the lease of which it is known that they are true, or false, or something, where
    every return of it agrees: `return buf, True`; `return buf, extra` behind `if extra == 0: return x, 0`."""
    seen = []
    for node in followed.endings.returned:
        value = getattr(graph.ops[node].at, "value", None)
        items = value.elts if isinstance(value, ast.Tuple) else []
        known = frozenset.intersection(*followed.solution.states[node].values())
        truths = ((f"[{i}]", _truth(item, known)) for i, item in enumerate(items))
        some = {(f"[{i}] is None", False) for i, item in enumerate(items) if _is_some(item, known)}
        seen.append(some.union((item, truth) for item, truth in truths if truth is not None))
    return frozenset(set.intersection(*seen)) if seen else frozenset()


def _is_some(item: ast.expr, known: Knowledge) -> bool:
    """The other one of a pair: `if right is None: return None, None`."""
    return isinstance(item, ast.Name) and (f"{item.id} is None", False) in known


def _truth(item: ast.expr, known: Knowledge) -> bool | None:
    match item:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Name(id=name):
            if not known.isdisjoint({(name, True), (f"{name} == 0", False), (f"{name} > 0", True)}):
                return True
            return False if (name, False) in known else None
    return None


def reads_field(value: ast.expr | None, own: str) -> bool:
    """`self.handles[-1]`, `self.local.pair[0]`: a place in a field that is written out in full."""
    if not isinstance(value, ast.Subscript):
        return False
    while isinstance(value, ast.Subscript | ast.Attribute):
        if isinstance(value, ast.Subscript) and not _is_constant(value.slice):
            return False
        value = value.value
    return isinstance(value, ast.Name) and value.id == own


def _is_constant(index: ast.expr) -> bool:
    operand = index.operand if isinstance(index, ast.UnaryOp) else index
    return isinstance(operand, ast.Constant)
