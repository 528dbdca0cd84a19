"""Paths of what a method's own object holds."""

import ast

from auditor.ir.ops import Path
from auditor.project.code.modules import Function


def own_field(function: Function, path: Path) -> bool:
    """`self.x` or `self.x[*]` of the method's own object."""
    if function.cls is None or function.parent is not None or not function.parameters or function.is_static:
        return False
    if "classmethod" in function.decorators:
        return False  # the class's own state is the process's
    return path[0] == function.parameters[0] and len(path) > 1 and path[1].startswith(".")


def in_anothers_table(path: Path) -> bool:
    """`self.tables.rows[*]`: an item of what another object has."""
    return len(path) > 3 and path[1][0] == path[2][0] == "." and any(piece[0] == "[" for piece in path[3:])


def shortened(path: Path) -> Path:
    """What is inside a container ends with the container: `self.x[*]` for anything deeper."""
    for index, piece in enumerate(path):
        if piece.startswith("["):
            of_a_pair = index == len(path) - 1 and piece[1:-1].isdigit()
            return path if of_a_pair else (*path[:index], "[*]")
    return path


def mentions(method: Function, attribute: str) -> bool:
    """By an attribute of that name, or by the name as a text."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == attribute)
        or (isinstance(node, ast.Constant) and node.value == attribute)
        for node in method.nodes
    )
