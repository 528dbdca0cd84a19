"""Whether somebody else ends a lock that a method takes of its own object and keeps."""

import ast

from auditor.project.code.modules import Function
from auditor.project.meaning.recognise import Recogniser
from auditor.project.meaning.sites import last_name
from auditor.protocols.vocabulary import LEASE_METHODS


def ended_alone(recogniser: Recogniser, taker: Function, acquire: ast.Call, attribute: str) -> bool:
    """Some other function releases a field of this name without having acquired it, or hands the field on.

    Where each that releases it acquires it first, each ends its own hold and none this one."""
    acquiring = last_name(acquire)
    for module in recogniser.calls.model.project.parsed():
        if f".{attribute}" not in module.text:
            continue
        for function in module.by_node.values():
            if function is taker or f".{attribute}" not in function.text:
                continue
            if _ends(recogniser, function, acquiring, attribute) or _hands_out(function, attribute):
                return True
    return _hands_out(taker, attribute)


def release_lent(function: Function, acquire: ast.Call) -> bool:
    """`loop.add_reader(fd, semaphore.release)`: the releasing method itself was given to somebody."""
    owner = acquire.func
    if not isinstance(owner, ast.Attribute):
        return False
    while function.parent is not None:
        function = function.parent
    key = ast.dump(owner.value)
    called = {id(node.func) for node in function.nodes if isinstance(node, ast.Call)}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in LEASE_METHODS
        and id(node) not in called
        and ast.dump(node.value) == key
        for node in function.nodes
    )


def _ends(recogniser: Recogniser, function: Function, acquiring: str, attribute: str) -> bool:
    own = [call for call in function.calls if _of_field(call.func, attribute)]
    releases = any(recogniser.releases(function, call, -1) for call in own)
    return releases and not any(last_name(call) == acquiring for call in own)


def _of_field(callee: ast.expr, attribute: str) -> bool:
    match callee:
        case ast.Attribute(value=ast.Attribute(attr=attr)):
            return attr == attribute
    return False


def _hands_out(function: Function, attribute: str) -> bool:
    """The field itself is passed, returned, or given another name."""
    used = {
        id(node.value)
        for node in function.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
    }
    entered = {
        id(item.context_expr)
        for node in function.nodes
        if isinstance(node, (ast.With, ast.AsyncWith))
        for item in node.items
    }
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.ctx, ast.Load)
        and id(node) not in used | entered
        for node in function.nodes
    )
