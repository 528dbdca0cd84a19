"""Whether there is anything in a module to run."""

import ast
import inspect
from typing import Any

import torch


def is_abstract(thing: Any) -> bool:
    """A module without a forward of its own or of a base, or one whose forward only raises or passes."""
    forward = getattr(thing, "forward", None)
    if forward is None or forward is torch.nn.Module.forward:
        return True
    try:
        tree = ast.parse(inspect.cleandoc("if 1:\n" + inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    body = [s for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for s in node.body]
    body = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return bool(body) and isinstance(body[0], ast.Raise | ast.Pass) and len(body) == 1
