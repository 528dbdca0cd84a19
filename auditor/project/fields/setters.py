"""Methods that do nothing but fill a field or a place in a table: `def mark_hot(self, layer, expert):
self.hot[expert] = self.cache.pin(layer, expert)`.

Anybody may say it a second time, and neither the method nor another one that fills the same place asks what
is there. Who begins something, `begin(rows)`, is answered by who ends it.
"""

import ast
import re
from collections.abc import Sequence

from auditor.project.code.field_paths import mentions
from auditor.project.code.modules import Function
from auditor.project.fields.filling_again import Filling, fillings, only_logs
from auditor.project.fields.forgetting import INITIAL
from auditor.project.fields.names_of_refillers import PREPARING
from auditor.project.fields.reckoning import comes_in_pairs

SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)

ENTERING = re.compile(
    r"_*(?:put|stage|join|seat|bind|give|fill|file|store|save|push|pack|fork|split|inherit|bring|lead|move|swap|page|call"
    r"|set_(?:out|up|off|in|aside)|moor|own|equip|see)(?:_|$)|setUp"
)
"""Methods that somebody calls once for each thing, which another one takes out again."""

IN_BETWEEN = re.compile(rf"{PREPARING.pattern}|_*(?:advance|grow)(?:_|$)|\w+_done$")
"""Methods that are given what has been there for a while, some time in its life."""


FEW = 3
"""Who makes a table, who fills it, and who ends what is in it."""

ONCE = re.compile(r"\w+\..*|(?:r|req|request|session|job|task|txn|call|conn|room)(?:_?id)?")
"""What a key is called of what comes once, and brings a number of its own."""

WORK = 8
"""So much is done with a lease before it is put into a table that few know."""


def only_fills(filling: Filling, family: Sequence[Function], enders: Sequence[Function] = ()) -> bool:
    """It is told which one, or what for, and the one statement in it fills the place. Where nobody but who
    ends the entries has to do with a table, nobody looks what is in it: there it may do more before."""
    method = filling.method
    if len(method.parameters) < 2 or method.name.startswith("_"):
        return False
    if comes_in_pairs(method.name) or ENTERING.match(method.name):
        return False
    if filling.owner != method.owner and not IN_BETWEEN.match(method.name):
        return False
    work = WORK if _is_known_to_few(filling, family, enders) else 1
    if not _is_all(method, filling.statement, work):
        return False
    others = (each for each in family if each is not method and each.name not in INITIAL)
    return not any(_fills(each, filling.field) for each in others)


def _is_known_to_few(filling: Filling, family: Sequence[Function], enders: Sequence[Function]) -> bool:
    if filling.key is None or len(enders) != 1 or ONCE.fullmatch(ast.unparse(filling.key)):
        return False
    knowing = [each for each in family if mentions(each, filling.field)]
    return len(knowing) <= FEW and not isinstance(getattr(filling.statement, "value", None), ast.Tuple)


def _is_all(method: Function, statement: ast.stmt, work: int) -> bool:
    """But for what it answers, or does with what is there now, and a way out where it got none."""
    said = [each for each in method.body if not (_is_a_text(each) or _is_refused(each))]
    return statement in said and len(said) <= 1 + work and all(isinstance(each, SIMPLE) for each in said)


def _is_refused(statement: ast.stmt) -> bool:
    """`if slot is None: return False`."""
    match statement:
        case ast.If(
            test=ast.Compare(left=ast.Name(), ops=[ast.Is()], comparators=[ast.Constant(value=None)]),
            body=[*before, ast.Return() | ast.Raise()],
            orelse=[],
        ):
            return all(map(only_logs, before))
    return False


def _is_a_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _fills(method: Function, field: str) -> bool:
    owners = {method.owner or "", *method.parameters}
    return any(fillings(method, owner, field) for owner in owners if owner)
