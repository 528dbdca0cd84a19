"""Fields that get another lease by an exchange, where nobody speaks of the former one any more:
`_, self.latest = self.latest, buffer`."""

import ast

from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling, same


def swapped_away(filling: Filling) -> bool:
    """Whether the name that the former one gets is never read."""
    match filling.statement:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            former = [to for to, value in zip(targets, values, strict=False) if same(value, filling.target)]
            return any(isinstance(to, ast.Name) and not _is_read(to.id, filling.method) for to in former)
    return False


def _is_read(name: str, method: Function) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in method.nodes)
