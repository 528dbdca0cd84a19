"""Keys that whoever has a table filled draws anew each time: `sid = uuid4().hex`, and `self.log_in(sid)`."""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.bindings import TEST_FILE, given_to, told_by_position
from auditor.project.code.calls import is_bound, parameter_for
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.filling_again import Filling
from auditor.project.meaning.sites import last_name
from auditor.source.nodes import walk

DRAWING = re.compile(
    r"next|uuid\d?|urandom|token_(?:hex|urlsafe|bytes)|ulid|nanoid|getrandbits"
    r"|_*(?:next|new|make|gen|generate|fresh|draw|create)_(?:\w+_)?(?:id|sid|key|token|number)"
)
"""Calls that give another one each time."""


def drawn_by_its_callers(filling: Filling, project: Project) -> bool:
    """Everybody who calls the method, but for tests, tells it a key of his own making."""
    if not isinstance(filling.key, ast.Name):
        return False
    told = list(_told(filling.method, filling.key.id, project))
    return bool(told) and all(_is_drawn(caller, key) for caller, key in told)


def _told(method: Function, parameter: str, project: Project) -> Iterator[tuple[Function, ast.expr]]:
    for module in project.parsed():
        if f"{method.name}(" not in module.text or TEST_FILE.search(module.path):
            continue
        for caller in list(module.by_node.values()):
            for call in caller.calls if caller is not method else ():
                if last_name(call) == method.name:
                    for at, value in told_by_position(call):
                        if parameter_for(method, at, is_bound(method, call)) == parameter:
                            yield caller, value


def _is_drawn(caller: Function, key: ast.expr) -> bool:
    made = [*given_to(caller, key.id)] if isinstance(key, ast.Name) else [key]
    return bool(made) and all(_draws(caller, value) for value in made)


def _draws(caller: Function, value: ast.expr) -> bool:
    """`f"s-{uuid4()}"`; a number that it counts up itself, `self.opened += 1`, is one, too."""
    counted = {
        ast.unparse(node.target)
        for node in caller.statements
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
    }
    return any(
        (isinstance(node, ast.Call) and DRAWING.fullmatch(last_name(node)) is not None)
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in counted)
        for node in walk(value)
    )
