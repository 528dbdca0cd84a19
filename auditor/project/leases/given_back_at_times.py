"""What is counted, reserved or pinned here, and given back on some of its ways by what is started for it:
`task.add_done_callback(done)`, where `done` returns for a task that failed before it gives the permit back.

Such a mark may be anybody's to end, but who names the one that ends it leaves it to nobody else. What is only
given back where something failed is kept on purpose otherwise."""

import ast
from collections.abc import Iterator, Set

from auditor.flow.held import Endings
from auditor.flow.lease import EXCEPTIONAL, Leak
from auditor.ir.ops import Call
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Function
from auditor.project.code.release_names import looks_releasing
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

OTHERS = ("returned", "stored", "taken", "later", "yielded", "unknown", "kept")
"""Ends after which somebody else may see to it."""


def given_back_at_times(
    function: Function, calls: Calls, endings: Endings, leaks: tuple[Leak, ...], ends: Set[str]
) -> tuple[Leak, ...]:
    """The losses on ordinary ways, where such a call is its one end; of two each may see to its own ways."""
    if len(endings.released) != 1 or not endings.released.keys() <= endings.sometimes:
        return ()
    if any(getattr(endings, each) for each in OTHERS):
        return ()
    op = function.graph.ops[next(iter(endings.released))]
    if not isinstance(op, Call) or not any(_ends_it(each, ends) for each in _started(function, calls, op.at)):
        return ()
    return tuple(leak for leak in leaks if leak.loss not in EXCEPTIONAL)


def _started(function: Function, calls: Calls, call: ast.Call) -> Iterator[Function]:
    """The functions that the call calls, or is told."""
    yield from calls.targets(function, call)[0]
    methods = function.cls.methods if function.cls is not None else {}
    for told in call.args:
        match told:
            case ast.Name(id=name) if name in function.nested:
                yield function.nested[name]
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == function.owner:
                if name in methods:
                    yield methods[name]


def _ends_it(started: Function, ends: Set[str]) -> bool:
    """Where nothing has failed. Of a declared protocol no names are known: what looks like an end will do."""
    failed = {id(node) for handled in _failures(started) for node in walk(handled)}
    return any(
        (last_name(call) in ends if ends else looks_releasing(call)) and id(call) not in failed
        for call in started.calls
    )


def _failures(started: Function) -> Iterator[ast.AST]:
    """Handlers, and what is done `if not success:`."""
    for node in started.nodes:
        match node:
            case ast.ExceptHandler():
                yield node
            case ast.If(test=ast.UnaryOp(op=ast.Not(), operand=ast.Name()), body=body):
                yield from body
