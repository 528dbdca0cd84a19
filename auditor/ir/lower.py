"""One function's syntax to its flow graph."""

import ast

from auditor.ir.builder import Builder
from auditor.ir.graph import Graph
from auditor.ir.objects import objects_or_none
from auditor.ir.ops import (
    Await,
    Call,
    Constant,
    Edge,
    Fresh,
    InPlace,
    Leave,
    Make,
    Move,
    Next,
    Nop,
    Unpack,
    Way,
)
from auditor.ir.peeks import looked_at_before
from auditor.ir.record_copies import copies_a_record
from auditor.ir.scope import FunctionNode, scope_of
from auditor.ir.statements import StatementLowering
from auditor.ir.tables import first_named, named_copies, named_tables

CONSTRUCTORS = frozenset(
    {"list", "dict", "set", "tuple", "sorted", "deque", "defaultdict", "OrderedDict", "ExitStack",
     "AsyncExitStack", "open"}
)  # fmt: skip
OWN_OBJECT = ("self", "cls")


def lower(function: FunctionNode, tables: frozenset[str] = frozenset()) -> Graph:
    """The flow graph of a function, a lambda, or a module's own statements; `tables` are the fields of its
    object that are dicts.

    Raises `graph.TooLarge` past the node limit.
    """
    builder = Builder()
    scope = scope_of(function)
    lowering = StatementLowering(builder, scope)
    lowering.looked_at = looked_at_before(function)
    lowering.tables = frozenset((name,) for name in named_tables(function))
    lowering.key_lists = named_copies(function)
    lowering.began_as = first_named(function)
    lowering.tables |= {(own, f".{field}") for own in scope.parameters[:1] for field in tables}
    builder.emit(Nop(function))
    if isinstance(function, ast.Lambda):
        lowering.do_Return(ast.copy_location(ast.Return(function.body), function.body))
    else:
        lowering.body(function.body)
    if builder.reachable:
        builder.leave(Leave(function, Way.FALL_THROUGH))
    graph = builder.graph
    graph.parameters = scope.parameters
    graph.fresh_roots = _fresh_roots(graph)
    graph.objects = objects_or_none(function)
    return graph


def _fresh_roots(graph: Graph) -> frozenset[str]:
    """Locals whose every binding is an object made here: a display, a container's constructor, a class's
    call; or a copy of a record, if nothing is done to what lies in its fields."""
    made: dict[str, bool] = {}
    copies: set[str] = set()
    receivers = (op.receiver for op in graph.ops if isinstance(op, Call))
    filled = {receiver[0] for receiver in receivers if receiver is not None and len(receiver) > 1}
    gathered = {op.target[0] for op in graph.ops if isinstance(op, Call) and _gathers(op)}
    for op in graph.ops:
        match op:
            case Make(target=(name,)):
                made[name] = made.get(name, True)
            case Call(target=(name,)):
                copies |= {name} if copies_a_record(op.at) else set()
                made[name] = made.get(name, True) and (_constructs(op) or name in copies)
            case Constant(target=(name,), value=None):
                made.setdefault(name, True)
            case Move(target=(name,), source=source):
                whole = source[1:] in ((), ("[:]",))  # a part of a list made here is a list made here
                if source[0] in copies:
                    copies.add(name)
                    whole = whole and name not in filled
                made[name] = made.get(name, True) and whole and made.get(source[0], False)
            case (
                Fresh(target=(name,))
                | Constant(target=(name,))
                | Next(target=(name,))
                | InPlace(target=(name,))
            ):
                made[name] = False if not isinstance(op, InPlace) else made.get(name, False)
            case Await(target=(name,), source=source):
                made[name] = source[0] in gathered
            case Unpack(targets=targets, at=ast.Tuple(elts=names) | ast.List(elts=names)):
                for (_, path), at in zip(targets, names, strict=True):
                    rest = isinstance(at, ast.Starred)  # `first, *rest = blocks` makes a list
                    made[path[0]] = rest and made.get(path[0], True)
    return frozenset(name for name, fresh in made.items() if fresh) - frozenset(graph.parameters)


def _gathers(op: Call) -> bool:
    """With `return_exceptions=True` what failed lies in the list as well, and is sorted out behind it."""
    return op.method == "gather" and not op.kwargs


def _constructs(op: Call) -> bool:
    """But for `self.open(name)` and `self.house.open(name)`, which may hand out what is there."""
    if op.receiver and (len(op.receiver) > 1 or op.receiver[0] in OWN_OBJECT) and op.method == "open":
        return False
    return op.method in CONSTRUCTORS or op.method[:1].isupper() or op.method.lstrip("_")[:1].isupper()


__all__ = ["Edge", "lower"]
