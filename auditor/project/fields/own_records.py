"""Whether an object that lends what it notes down gives all of it back itself: a step, a scope, an arena."""

import ast
from collections.abc import Iterator

from auditor.project.code.modules import Function
from auditor.project.meaning.releases import Releases
from auditor.project.outcome import Outcome
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.name_bindings import mentions
from auditor.project.shapes.pool_state import own_parameters


def sees_to_its_records(recogniser: Releases, outcome: Outcome) -> bool:
    """Another method gives back what stands in that field, and nothing that it is told; or the module keeps
    one for each key, which whoever asks is shown."""
    lending, beside = outcome.function, outcome.beside
    if any(path[0].startswith("@") for path in beside):
        return True
    if lending.cls is None:
        return False
    fields = {path[1][1:] for path in beside if len(path) > 1 and path[1].startswith(".")}
    others = [method for method in lending.cls.methods.values() if method is not lending]
    return any(_drains(recogniser, method, fields, outcome.acquisition.protocol) for method in others)


def strikes_off_its_records(recogniser: Releases, outcome: Outcome) -> bool:
    """Where all that knows of what is handed out are tables of the object that lends, off which its own end
    strikes what it is told: `self.held.pop(lease.token)` in `surrender(lease)`."""
    cls, own = outcome.function.cls, outcome.function.owner
    fields = {path[1][1:] for path in outcome.beside if len(path) > 2 and path[0] == own}
    if cls is None or not fields or any(path[0] != own for path in outcome.beside):
        return False
    protocol = outcome.acquisition.protocol
    ends = (method for method in cls.methods.values() if is_its_end(recogniser, method, protocol))
    return any(fields <= set(struck_off(method)) for method in ends)


def is_its_end(recogniser: Releases, method: Function, protocol: str) -> bool:
    return method in recogniser.releasing and recogniser.releasing[method][0].name == protocol


def struck_off(method: Function) -> Iterator[str]:
    """The tables that it takes something out of which it looks up by what it is told."""
    told = frozenset(own_parameters(method))
    for node in method.nodes:
        match node:
            case (
                ast.Delete(targets=[ast.Subscript(value=ast.Attribute(attr=field), slice=key)])
                | ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr=field), attr="pop" | "discard" | "remove"),
                    args=[key, *_],
                )
            ):
                if mentions(key, told, frozenset()):
                    yield field


def _drains(recogniser: Releases, method: Function, fields: set[str], protocol: str) -> bool:
    noted = {id(node) for node in method.nodes if isinstance(node, ast.Attribute) and node.attr in fields}
    if not noted:
        return False
    names = field_work(method).derived(frozenset(), noted)
    return any(
        mentions(operand, names, noted)
        and (
            recogniser.releases(method, call, position, protocol)
            or _hands_back(recogniser, method, call, position, protocol)
        )
        for call in method.calls
        for position, operand in _operands(call)
    )


def _hands_back(recogniser: Releases, method: Function, call: ast.Call, position: int, protocol: str) -> bool:
    """`self.done(region)`, a method of the same object that gives back what it is told."""
    for helper in recogniser.calls.targets(method, call)[0] if position >= 0 else ():
        told = own_parameters(helper)[position : position + 1] if helper.cls is method.cls else ()
        for inner in helper.calls if told else ():
            for at, operand in _operands(inner):
                named = isinstance(operand, ast.Name) and operand.id == told[0]
                if named and recogniser.releases(helper, inner, at, protocol):
                    return True
    return False


def _operands(call: ast.Call) -> Iterator[tuple[int, ast.expr]]:
    """The arguments, and at -1 the object itself."""
    yield from enumerate(call.args)
    if isinstance(call.func, ast.Attribute):
        yield -1, call.func.value
