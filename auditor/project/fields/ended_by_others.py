"""Leases and fields that end without a release one could point to: with the object they were made from, by
what took them over, by a base class of another library, by a caller who reaches them through the object."""

import ast
import re
from collections.abc import Iterable, Iterator

from auditor.ir.graph import Graph
from auditor.ir.ops import Call, Fresh
from auditor.project.code.bindings import given_to, own_attribute
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Class, Function, last_part
from auditor.source.nodes import walk

PLAIN_BASES = frozenset({"object", "ABC", "Generic", "Protocol", "Enum", "Exception", "NamedTuple", "Module"})
LOOPS = (ast.For, ast.AsyncFor, ast.While)
DESTROYING = frozenset({"destroy", "dispose"})
"""Methods that end everything that was ever made from an object, such as the sockets of a context."""

CONNECTED = re.compile(
    r"\w*(?:Connection|Server|Handler|Transport|Dispatcher|dispatcher|Client|async_chat|DatabaseWrapper)"
)
"""Base classes that keep a socket, a file or a connection under a name of theirs, and close it."""

THEIRS = frozenset({"sock", "_sock", "socket", "_socket", "file", "fp", "stream", "transport", "connection"})

ENDING_ITSELF = frozenset({"delete", "destroy", "dispose", "close", "free", "release"})

DETACHING = frozenset({"start_new_session", "process_group", "preexec_fn", "creationflags"})
"""How a process is told that it is no part of whatever ends those that its parent started."""


QUEUEING = frozenset({"put", "put_nowait", "append", "appendleft", "push", "add", "submit", "send", "start",
                      "create_task", "ensure_future", "run_in_executor"})  # fmt: skip
"""Methods by which others get to work, or something to work with."""

STARTING = frozenset({"create_task", "ensure_future"})


def counts_places(acquire: ast.Call, function: Function, *, ended_here: bool) -> bool:
    """`self.places_sem.acquire()`, and another method that releases what it never took: each place is given
    back when it is free again, unless it is `ended_here` on one way, or a way says that none was taken, and
    nothing is queued. A semaphore that begins at 0 counts arrivals, which nobody gives back."""
    match acquire.func:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(), attr=attr)) if (
            function.cls is not None and any(_begins_empty(m, attr) for m in function.cls.methods.values())
        ):
            return True
        case ast.Attribute(value=ast.Attribute(value=ast.Name(), attr=attr) as semaphore) if (
            "sem" in attr.lower() and function.cls is not None
        ):
            if ended_here and not any(_queues(call, function) for call in function.calls):
                return False
            others = (method for method in function.cls.methods.values() if method is not function)
            return any(_called_on(method, semaphore) == {"release"} for method in others)
    return False


def _queues(call: ast.Call, function: Function) -> bool:
    """`self.inbox.put(item)`; not `self.tasks.add(task)` of a task that is started here."""
    root = call.func
    while isinstance(root, ast.Attribute):
        root = root.value
    own = isinstance(root, ast.Name) and root.id == function.owner
    tasks = bool(call.args) and all(_is_a_task(each, function) for each in call.args)
    return last_part(call.func) in QUEUEING and own and not tasks


def _is_a_task(told: ast.expr, function: Function) -> bool:
    given = given_to(function, told.id) if isinstance(told, ast.Name) else iter(())
    return any(isinstance(each, ast.Call) and last_part(each.func) in STARTING for each in given)


def _begins_empty(method: Function, field: str) -> bool:
    """`self.arrived = Semaphore(0)`."""
    for node in method.nodes:
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=attr)], value=ast.Call(func=made) as call) if (
                attr == field
            ):
                counts = [*call.args, *(keyword.value for keyword in call.keywords)]
                empty = any(isinstance(each, ast.Constant) and each.value == 0 for each in counts)
                return empty and ast.unparse(made).endswith("Semaphore")
    return False


def _called_on(method: Function, owner: ast.expr) -> set[str]:
    written = ast.dump(owner)
    return {
        call.func.attr
        for call in method.calls
        if isinstance(call.func, ast.Attribute) and ast.dump(call.func.value) == written
    }


def ends_with_its_script(acquire: ast.Call, function: Function) -> bool:
    """Under `if __name__ == "__main__":`, outside loops: the process has little left to do."""
    if not isinstance(function.node, ast.Module):
        return False
    mains = (each for each in function.node.body if isinstance(each, ast.If) and _around(each, acquire))
    return any(
        ast.unparse(each.test) == "__name__ == '__main__'"
        and not any(isinstance(inner, LOOPS) and _around(inner, acquire) for inner in walk(each))
        for each in mains
    )


def _around(statement: ast.stmt, node: ast.expr) -> bool:
    return statement.lineno <= node.lineno <= (statement.end_lineno or 0)


def expected_to_fail(acquire: ast.Call, function: Function) -> bool:
    """`with self.assertRaises(FileNotFoundError): open(path)`."""
    return any(
        isinstance(node, (ast.With, ast.AsyncWith))
        and _around(node, acquire)
        and any("raises" in ast.unparse(item.context_expr).lower() for item in node.items)
        for node in function.nodes
    )


def left_detached(acquire: ast.Call, function: Function) -> bool:
    """`Popen(command, start_new_session=True)` is meant to outlive whoever starts it, unless its group is
    killed."""
    asked = any(keyword.arg in DETACHING and _detaches(keyword) for keyword in acquire.keywords)
    return asked and not any(last_part(call.func) == "killpg" for call in function.calls)


def _detaches(keyword: ast.keyword) -> bool:
    match keyword:
        case ast.keyword(arg="start_new_session", value=ast.Constant(value=chosen)):
            return chosen is True
        case ast.keyword(arg="process_group", value=ast.Constant(value=group)):
            return group == 0
        case ast.keyword(arg="preexec_fn", value=ast.Name() | ast.Attribute() as before):
            return last_part(before) in ("setsid", "setpgrp")
    return any(
        last_part(node) == "DETACHED_PROCESS"
        for node in walk(keyword.value)
        if isinstance(node, (ast.Name, ast.Attribute))
    )


def only_compared(acquire: Call, graph: Graph) -> bool:
    """`if allocator.allocate(stream) < 0`: what it returns is how it went."""
    return any(
        isinstance(op, Fresh) and acquire.target in op.uses and isinstance(op.at, ast.Compare)
        for op in graph.ops
    )


def of_an_allocator_of_its_own(acquire: ast.Call, function: Function) -> bool:
    """`arena = Arena()` of a class that nobody here knows, `arena.allocate(n)`, and nothing else is done with
    the arena: what it lent ends with it."""
    match acquire.func:
        case ast.Attribute(value=ast.Name(id=allocator)):
            names = [node for node in function.nodes if isinstance(node, ast.Name) and node.id == allocator]
            bound = [node for node in names if isinstance(node.ctx, ast.Store)]
            owners = {id(node.value) for node in function.nodes if isinstance(node, ast.Attribute)}
            return len(bound) == 1 and all(node in bound or id(node) in owners for node in names)
    return False


def taking_over(holder: str, releases: Iterable[ast.AST], function: Function) -> list[ast.Call]:
    """`try: reader = Reader(file)` and `except: file.close(); raise`: where it can be made, the reader has
    the file. Only where nothing else releases it, and what is made of it is an object, or is closed, or it
    became an option of a socket: `socket.setsockopt(USE_FD, number)`."""
    tries = [node for node in function.nodes if isinstance(node, ast.Try)]
    guarding: list[ast.Try] = []
    for release in releases:
        around = [each for each in tries if any(_rolls_back(handler, release) for handler in each.handlers)]
        if not around:
            return []
        guarding.append(around[-1])
    statements = (statement for each in guarding for statement in each.body)
    return [call for statement in statements if (call := _taker(statement, holder, function)) is not None]


def _taker(statement: ast.stmt, holder: str, function: Function) -> ast.Call | None:
    """The call of this statement, if it is given the lease and has it from then on."""
    value = getattr(statement, "value", None)
    call = value.value if isinstance(value, ast.Await) else value
    if not isinstance(call, ast.Call) or not any(_is_named(each, holder) for each in call.args):
        return None
    name = last_part(call.func)
    takes = name[:1].isupper() or name == "setsockopt" or _is_closed(statement, function)
    return call if takes else None


def _rolls_back(handler: ast.ExceptHandler, release: ast.AST) -> bool:
    return isinstance(handler.body[-1], ast.Raise) and any(node is release for node in walk(handler))


def _is_closed(statement: ast.stmt, function: Function) -> bool:
    """Whether what it binds has a `close()` later."""
    bound = {
        node.id
        for target in getattr(statement, "targets", [])
        for node in walk(target)
        if isinstance(node, ast.Name)
    }
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ("close", "aclose")
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in bound
        for call in function.calls
    )


def _is_named(argument: ast.expr, name: str) -> bool:
    return isinstance(argument, ast.Name) and argument.id == name


def destroyed_with_its_maker(acquire: ast.Call, function: Function, family: Iterable[Function]) -> bool:
    """`self.ctx.socket(...)`, and a method that always runs `self.ctx.destroy()`."""
    match acquire.func:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id=name), attr=maker)) if (
            name == function.owner
        ):
            return any(_always_destroys(method, maker) for method in family)
    return False


def _always_destroys(method: Function, maker: str) -> bool:
    calls = [
        call
        for call in method.calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in DESTROYING
        and not call.args  # `self.pool.dispose(buffer)` ends one of them
        and isinstance(call.func.value, ast.Attribute)
        and call.func.value.attr == maker
    ]
    returns = [node.lineno for node in method.nodes if isinstance(node, ast.Return)]
    guarded = {id(inner) for node in method.nodes if isinstance(node, ast.If) for inner in walk(node)}
    return any(id(call) not in guarded and all(call.lineno < line for line in returns) for call in calls)


def reached_through(method: Function, attribute: str) -> bool:
    """`__getattr__` that answers with the field's own methods, its `close` among them."""
    own = method.owner
    if method.name != "__getattr__":
        return False
    for call in method.calls:
        match call:
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Attribute(value=ast.Name(id=name), attr=attr), *_],
            ) if name == own and attr == attribute:
                return True
    return False


def ended_as_a_whole(calls: Calls, family: Iterable[Function], attribute: str) -> bool:
    """`self.vertices.delete()`, of an object of who knows what class that was made around what is held."""
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ENDING_ITSELF
        and own_attribute(call.func.value, method.owner or "") == attribute
        and not calls.targets(method, call)[0]
        for method in family
        for call in method.calls
    )


def told_to_its_base(function: Function, attribute: str) -> bool:
    """`super().__init__([self.rows])`: the base keeps it where it sees to it."""
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "__init__"
        and isinstance(call.func.value, ast.Call)
        and any(own_attribute(each, function.owner or "") == attribute for each in _within(call))
        for call in function.calls
    )


def _within(call: ast.Call) -> Iterator[ast.expr]:
    """What it is told, in lists as well."""
    for each in (*call.args, *(keyword.value for keyword in call.keywords)):
        yield each
        yield from each.elts if isinstance(each, ast.List | ast.Tuple) else ()


def closed_by_its_base(lineage: Iterable[Class], attribute: str) -> bool:
    """A connection's class overrides how the socket is made; how it is closed stands in its base."""
    mine = list(lineage)
    names = {cls.name for cls in mine}
    bases = (base for cls in mine for base in cls.node.bases)
    return attribute in THEIRS and any(
        (isinstance(base, ast.Attribute) or last_part(base) not in names)
        and CONNECTED.fullmatch(last_part(base)) is not None
        for base in bases
    )


def has_unknown_base(family: Iterable[Function], also: Iterable[Class] = ()) -> bool:
    """A base class that was not found may call what its subclasses must define: `self._close()`."""
    mine = {method.cls for method in family if method.cls is not None}.union(also)
    return any(
        last_part(base) not in {other.name for other in mine if other is not cls} | PLAIN_BASES
        for cls in mine
        for base in cls.node.bases
    )
