"""What a function opens by a call that nothing is known of, and closes itself on its straight way:

    cursor = connection.cursor()
    ...
    if row is None:
        return None
    cursor.close()

By closing it the function says that it owns it, and so on its other ways, too (the belief of Engler et al.,
"Bugs as Deviant Behavior", SOSP 2001). Only of calls that are named like an opening; what is looked up, is
somebody else's."""

import ast
import re
from collections.abc import Iterator

from auditor.flow.effects import Handle, Value
from auditor.project.code.bindings import awaited, given_to, suites_of
from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.project.meaning.source import Source
from auditor.protocols.vocabulary import split

OPENING = frozenset({"open", "connect", "dial", "begin", "start", "create", "make", "new", "spawn", "launch",
                     "boot", "acquire", "borrow", "lease", "checkout", "accept", "attach", "cursor",
                     "session", "transaction", "socket", "channel", "connection", "reader", "writer",
                     "stream", "factory"})  # fmt: skip
"""Words of calls by which something is opened for who calls."""

LOOKING_UP = frozenset({"get", "find", "lookup", "current", "existing", "cached", "peek", "shared"})

LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)
CLOSED = re.compile(r"^[ \t]+(?:await )?(\w+)\.a?close\(\)", re.MULTILINE)
CLOSING = frozenset({"close", "aclose"})
PROTOCOL = "files"


def closed_here(recogniser: Recogniser) -> Iterator[tuple[Function, ast.Call, Source]]:
    """If files are asked for at all."""
    if not any(protocol.name == PROTOCOL for protocol in recogniser.built_in):
        return
    source = Source(PROTOCOL, "built-in", Handle.RESULT, Value.OBJECT, second_hand=True)
    project = recogniser.calls.model.project
    for path in sorted(path for path, text in project.sources.items() if _may_close(text)):
        module = project.module(path)
        for function in module.by_node.values() if module is not None else ():
            for call in _opened_and_closed(function):
                if recogniser.source(function, call) is None and _may_open(recogniser, function, call):
                    yield function, call, source


def _may_close(text: str) -> bool:
    """Whether some name that is closed was given something in the text."""
    closed = CLOSED.findall(text) if "close()" in text else []
    return any(f" {name} = " in text for name in set(closed))


def _opened_and_closed(function: Function) -> Iterator[ast.Call]:
    """With the statement that closes in the same list of statements as the one that opens, so that every way
    which is not cut short comes by it."""
    if isinstance(function.node, ast.Lambda) or not any(last_name(c) in CLOSING for c in function.calls):
        return
    for suite in suites_of(function.node):
        for at, statement in enumerate(suite):
            for name, call, behind in _opening(statement):
                alone = len(list(given_to(function, name))) == 1
                if alone and any(_closes(later, name) for later in (*behind, *suite[at + 1 :])):
                    yield call


def _opening(statement: ast.stmt) -> Iterator[tuple[str, ast.Call, list[ast.stmt]]]:
    """The name and the call of `conn = connect()`, with what comes right behind it in a `try` whose handlers
    all leave: `try: conn = connect()`, `except OSError: return False`."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if isinstance(
            call := awaited(value), ast.Call
        ):
            yield name, call, []
        case ast.Try(body=body, handlers=handlers, orelse=orelse) if handlers:
            if all(isinstance(handler.body[-1], LEAVING) for handler in handlers):
                for at, inner in enumerate(body):
                    if not isinstance(inner, ast.Try):
                        yield from (
                            (name, call, [*body[at + 1 :], *orelse]) for name, call, _ in _opening(inner)
                        )


def _closes(statement: ast.stmt, name: str) -> bool:
    """`cursor.close()`, `await cursor.aclose()`"""
    match statement:
        case ast.Expr(value=value):
            match awaited(value):
                case ast.Call(func=ast.Attribute(value=ast.Name(id=closed), attr=way), args=[]):
                    return closed == name and way in CLOSING
    return False


def _may_open(recogniser: Recogniser, function: Function, call: ast.Call) -> bool:
    """By its name; and a function of the tree must make what it returns."""
    words = set(split(last_name(call)))
    if words.isdisjoint(OPENING) or not words.isdisjoint(LOOKING_UP):
        return False
    targets, constructed, _ = recogniser.calls.targets(function, call)
    return constructed is None and all(map(_makes_what_it_returns, targets))


def _makes_what_it_returns(target: Function) -> bool:
    returned = [node.value for node in target.of_kind(ast.Return) if node.value is not None]
    made = (awaited(value) for value in returned)
    return bool(returned) and all(
        isinstance(value, ast.Call) and last_name(value).lstrip("_")[:1].isupper() for value in made
    )
