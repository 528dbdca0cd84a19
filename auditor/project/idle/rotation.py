"""A store that is gone through once: `for _ in range(len(self._free)):` takes the first, looks at it, and
puts it back behind the others, or has what it was looking for. Whatever is passed over on the way has to go
back, though its fields are cleared meanwhile: nothing of that keeps it."""

import ast
from collections.abc import Sequence, Set

from auditor.ir.ops import Call, Path, Store
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function

STRIKING_OFF = frozenset({"pop", "discard", "remove"})


def is_gone_through_once(loops: Sequence[ast.AST], taking: ast.expr, own: str) -> bool:
    """Whether the innermost of these loops has a turn for each of what is taken out here."""
    taken = taking.func if isinstance(taking, ast.Call) else None
    field = own_attribute(taken.value, own) if isinstance(taken, ast.Attribute) else None
    innermost = max(loops, key=lambda loop: getattr(loop, "lineno", 0), default=None)
    match innermost:
        case ast.For(
            iter=ast.Call(func=ast.Name(id="range"), args=[ast.Call(func=ast.Name(id="len"), args=[whole])])
        ):
            return field is not None and own_attribute(whole, own) == field
    return False


def clears(function: Function, op: Store, places: Set[Path]) -> bool:
    """`chunk.dirty = False`, `page.key = None`."""
    if op.target[:1] not in places or len(op.target) != 2:
        return False
    return any(
        isinstance(node, ast.Assign)
        and any(target is op.at for target in node.targets)
        and isinstance(node.value, ast.Constant)
        and not node.value.value
        for node in function.statements
    )


def strikes_off(call: Call, own: str, places: Set[Path]) -> bool:
    """`chunk.data.zero_()`; `self.by_key.pop(page.key, None)`, which is told what the page is found by."""
    receiver = call.receiver or ("",)
    if receiver[:1] in places:
        return len(receiver) > 1 and call.method.endswith("_") and not call.method.startswith("_")
    given = [path for path, _ in call.args]
    return receiver[0] == own and call.method in STRIKING_OFF and places.isdisjoint(given)
