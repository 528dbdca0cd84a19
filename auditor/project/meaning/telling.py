"""What a function's result says of what it did with a lease: `return False` where it did nothing."""

import ast
from collections.abc import Iterable, Set

from auditor.flow.clauses import Fact
from auditor.flow.follow import known_at_nodes
from auditor.flow.held import Held
from auditor.flow.knowledge import EQUAL, NOTHING, SAME, Knowledge, excluded
from auditor.flow.operands import uses
from auditor.flow.solve import Solution
from auditor.ir.graph import Graph
from auditor.ir.ops import RESULT, Assume, Await, Call, Leave, Move, Unpack, Way
from auditor.source.nodes import walk

NONE = ast.Constant(value=None)
IS_THERE: Knowledge = frozenset({("", True), (" is None", False)})


def said_by(graph: Graph, solution: Solution[Held], left: Iterable[tuple[int, Held]]) -> Knowledge:
    """What is known of the result, without its name, wherever the lease is left as it was."""
    said = [said_at(graph, node, solution.states[node].get(held, NOTHING)) for node, held in left]
    return frozenset.intersection(*said) if said else NOTHING


def tells_apart(
    graph: Graph,
    solution: Solution[Held],
    said: Knowledge,
    left: Iterable[tuple[int, Held]],
    ended: bool,
    returning: Set[int] = frozenset(),
) -> bool:
    """Whether all other ways out return something of which the opposite is known; `ended`: some of them are
    left without the lease; `returning` are those that return it."""
    if not said:
        return False
    unchanged = set(left)
    known = known_at_nodes(graph) if ended else {}
    others = []
    for node, op in enumerate(graph.ops):
        if isinstance(op, Leave) and op.way is not Way.RAISE:
            here = solution.states.get(node, {})
            if node in returning:
                others += [IS_THERE for held in here if (node, held) not in unchanged]
                continue
            others += [said_at(graph, node, here[held]) for held in here if (node, held) not in unchanged]
            if ended and (not here or _spelt_out(getattr(op.at, "value", None) or NONE) is None):
                others.append(said_at(graph, node, known.get(node, NOTHING)))
    return bool(others) and any(all(_opposed(fact, other) for other in others) for fact in said)


def _opposed(fact: Fact, other: Knowledge) -> bool:
    key, truth = fact
    return (key, not truth) in other or (truth and key.startswith(EQUAL) and excluded(key, other))


def asked_of(graph: Graph, call: Call) -> bool:
    """Whether the function decides by what the call returned, and by nothing that cannot be followed."""
    names = names_of_answer(graph, call)
    asked = [op for op in graph.ops if isinstance(op, Assume)]
    about = [
        op
        for op in asked
        if (op.subject or ("",))[0] in names
        or (not names.isdisjoint(op.names) and not _measures(op.at, names))
    ]
    plain = [op.key for op in about if not isinstance(op.at, ast.BoolOp)]
    return bool(plain) and all(any(_is_followed(key, name) for name in names) for key in plain)


def _measures(test: ast.AST, names: Set[str]) -> bool:
    """`len(span) < n` and `span.pages < n`: there is one, then."""
    inner = [
        part
        for node in walk(test)
        if isinstance(node, ast.Attribute)
        or (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "len")
        for part in walk(node)
    ]
    within = {id(part) for part in inner}
    return all(id(node) in within for node in walk(test) if isinstance(node, ast.Name) and node.id in names)


def ignored(graph: Graph, call: Call) -> bool:
    """Whether the function does nothing with it but return it, at once or under a name that it gives it."""
    names = names_of_answer(graph, call) - {RESULT[0]}
    read = [op for op in graph.ops if any(path[0] in names for path in uses(op))]
    given = [op for op in graph.ops if isinstance(op, Move | Await | Call) and op.target[0] in names]
    once = len({op.target for op in given}) == len(given)
    return once and all(
        isinstance(op, Move | Await) and op.target[0] in names | {RESULT[0]} and len(op.source) == 1
        for op in read
    )


def names_of_answer(graph: Graph, call: Call) -> set[str]:
    names = {call.target[0]}
    for op in graph.ops:
        if isinstance(op, Move | Await) and op.source[0] in names and len(op.source) == 1:
            names.add(op.target[0])
        elif isinstance(op, Unpack) and op.source[0] in names:
            names |= {target[0] for _, target in op.targets}
    return names


def _is_followed(key: str, name: str) -> bool:
    """`rc`, `rc[0]`, `rc is None`, `rc == BUSY`, `rc < 0`; not `rc in (BUSY, FULL)`."""
    asked = key[len(name) :] if key.startswith(name) else "?"
    return asked in ("", " < 0") or asked.startswith((EQUAL, SAME, "["))


def said_at(graph: Graph, node: int, known: Knowledge) -> Knowledge:
    op = graph.ops[node]
    if not isinstance(op, Leave):
        return NOTHING  # put where it stays before the function is left
    value = op.at.value if isinstance(op.at, ast.Return) else None
    if op.way is Way.FALL_THROUGH or value is None:
        return frozenset({("", False), (" is None", True)})
    spelt = _spelt_out(value)
    if spelt is not None:
        return spelt
    name = value.id if isinstance(value, ast.Name) else RESULT[0]
    return frozenset((key[len(name) :], truth) for key, truth in known if key in (name, f"{name} is None"))


def _spelt_out(value: ast.expr) -> Knowledge | None:
    """Of `None`, `False`, `-1` and `Status.FULL` all that is asked about is known."""
    text = ast.unparse(value)
    equal = {(f"{way}{text}", True) for way in (EQUAL, " is ")}
    match value:
        case ast.Constant(value=constant) | ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=constant)):
            negative = isinstance(value, ast.UnaryOp)
            number = isinstance(constant, int | float) and not isinstance(constant, bool)
            below = {(" < 0", negative)} if number else set()
            return frozenset({("", bool(constant)), (" is None", constant is None), *equal, *below})
        case ast.Tuple(elts=items):
            told = ((at, _spelt_out(item) or NOTHING) for at, item in enumerate(items))
            return frozenset((f"[{at}]{key}", truth) for at, known in told for key, truth in known)
        case ast.Attribute(value=ast.Name() | ast.Attribute(), attr=member) if member.isupper():
            return frozenset({(" is None", False), *equal})
        case ast.Name(id=name) if name.isupper():
            return frozenset({(" is None", False), *equal})
    return None
