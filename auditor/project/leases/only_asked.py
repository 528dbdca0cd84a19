"""Functions that take something only to see whether they can: `if budget.reserve(step): total += step`, and
`return total` in `probe_capacity(step)`; `return budget.reserve(need)` in `fits(request)`; how often,
`return sum(1 for key in keys if cache.pin(key))`; or to measure it, `return region.size` in
`output_length(rid)`.

Nobody is told what was taken: what they answer is a number of turns, or whether there was room."""

import ast
from collections.abc import Iterator, Sequence, Set

from auditor.ir.calls import LOGGING
from auditor.project.code.bindings import assignments
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import names_in
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import ACQUIRE_WORDS, split
from auditor.source.nodes import walk

QUESTIONS = frozenset({"can", "could", "would", "fits", "fit", "has", "is", "are", "busy", "possible"})
"""First words of what only asks."""

MEASURES = frozenset({"estimate", "usage", "utilization", "pressure", "headroom", "length", "size", "depth"})
"""Words behind the first one of what says how much there is."""

MOST = frozenset({"largest", "longest", "biggest"})

TAKING = ACQUIRE_WORDS | {"hold", "enter", "admit", "begin", "start", "charge", "join", "schedule", "fill",
                            "prefetch", "preload", "load"}  # fmt: skip
"""Words of functions that mean to leave something taken."""


def only_asked(function: Function, call: ast.Call, ends: Set[str]) -> ast.AST | None:
    """The way out. `ends` are the names of what gives back."""
    words = split(function.name)
    if function.name.startswith("_") or not TAKING.isdisjoint(words) or goes_on(function, call, ends):
        return None
    answers = [node for node in function.statements if isinstance(node, ast.Return)]
    if not answers or not all(node.value is not None for node in answers):
        return None
    found = list(_asked(function, call, words, [node for node in answers if node.value is not None]))
    return found[0] if found else None


def _asked(
    function: Function, call: ast.Call, words: Sequence[str], answers: list[ast.Return]
) -> Iterator[ast.Return]:
    counters = set(_counters(function))
    given = [(node, node.value) for node in answers if node.value is not None]
    asking = bool(words) and words[0] in QUESTIONS
    if asking:
        yield from (node for node, value in given if _is(value, call))
        yield from _said_yes(function, call, answers)
    if not (MEASURES.isdisjoint(words[1:]) and MOST.isdisjoint(words)):
        yield from (
            node for node in answers if node.lineno > call.lineno and not _hands_out(function, node, call)
        )
    elif asking:
        return
    elif any(call in walk(test) for test in _tests(function)) and counters:
        if all(isinstance(value, ast.Constant) or names_in(value) & counters for _, value in given):
            yield from (node for node, value in given if names_in(value) & counters)
    else:
        yield from (
            node
            for node, value in given
            if _only_counts(function, value, call) or _only_denied(function, value, call)
        )


def _is(value: ast.expr, call: ast.Call) -> bool:
    """`return pool.take(n)`, `return pool.take(n) is not None`, `return not lock.acquire(timeout=0)`"""
    return call in (value, getattr(value, "operand", None), getattr(value, "left", None))


def _hands_out(function: Function, answer: ast.Return, call: ast.Call) -> bool:
    """What was taken, and not something about it."""
    names = {
        target.id for target, given in assignments(function) if given is call and isinstance(target, ast.Name)
    }
    within = {id(node.value) for node in walk(answer) if isinstance(node, ast.Attribute)}
    within |= {id(node.left) for node in walk(answer) if isinstance(node, ast.Compare)}
    return any(
        isinstance(node, ast.Name) and node.id in names and id(node) not in within for node in walk(answer)
    )


def _said_yes(function: Function, call: ast.Call, answers: list[ast.Return]) -> list[ast.Return]:
    """`if book.draw(channel, cost): return True` of a function that else answers False."""
    plain = all(
        isinstance(each.value, ast.Constant) and isinstance(each.value.value, bool) for each in answers
    )
    return [
        inner
        for node in function.of_kind(ast.If)
        if plain and call in walk(node.test)
        for inner in node.body
        if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Constant) and inner.value.value
    ]


def _only_denied(function: Function, value: ast.expr, call: ast.Call) -> bool:
    """`free = budget.try_grant()` and `return {"congested": not free}`: nobody is told of the permit."""
    names = [
        target.id for target, given in assignments(function) if given is call and isinstance(target, ast.Name)
    ]
    if len(names) != 1:
        return False
    reads = [node for node in function.of_kind(ast.Name) if node.id == names[0]]
    denied = [node.operand for node in walk(value) if isinstance(node, ast.UnaryOp)]
    return len(reads) == 2 and any(read in denied for read in reads)


def _only_counts(function: Function, value: ast.expr, call: ast.Call) -> bool:
    """How often it could, or whether it could each time; nobody is told of those that it is asked for."""
    match value:
        case ast.Call(
            func=ast.Name(id="sum" | "any" | "all"), args=[ast.GeneratorExp() | ast.ListComp() as made]
        ):
            tests = [test for generator in made.generators for test in generator.ifs]
            counted = isinstance(made.elt, ast.Constant) and any(call in walk(test) for test in tests)
            over = {name for generator in made.generators for name in names_in(generator.iter)}
            others = (each for each in function.calls if each not in (call, value) and not _logs(each))
            noted = any(over & names_in(given) for each in others for given in each.args)
            return (counted or _is(made.elt, call)) and not noted
    return False


def goes_on(function: Function, call: ast.Call, ends: Set[str]) -> bool:
    """Something is given back, put somewhere, or told of what the call was told."""
    told = {name for each in call.args for name in names_in(each)} - {function.owner}
    for node in function.nodes:
        if isinstance(node, ast.Call) and node is not call:
            given = {name for each in node.args for name in names_in(each)}
            if last_name(node) in ends or (node.lineno > call.lineno and given & told and not _logs(node)):
                return True
        elif _yields_or_stores(node) and getattr(node, "lineno", 0) >= call.lineno:
            return True
    return False


def _yields_or_stores(node: ast.AST) -> bool:
    stores = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
    return stores or isinstance(node, ast.Yield | ast.YieldFrom)


def _logs(call: ast.Call) -> bool:
    return last_name(call) in LOGGING | {"len", "min", "max", "range"}


def _tests(function: Function) -> Iterator[ast.expr]:
    for node in function.nodes:
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def _counters(function: Function) -> Iterator[str]:
    """Names that are a number at first and counted on, or lists of which only the length is asked for, and
    what a loop over a range counts."""
    for node in function.nodes:
        match node:
            case ast.AugAssign(target=ast.Name(id=name)):
                yield name
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"))):
                yield name
            case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]):
                yield name
