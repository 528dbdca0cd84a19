"""Pieces of access paths that lead to a lease only indirectly: from a path within a directory to the
directory, from an archive to the file that it was opened over."""

import ast
import re
from collections.abc import Callable

from auditor.ir.ops import Path

OVER = "<over>"
"""From what reads or writes through a file to the file, which its own end leaves open."""

WITHIN = "./"
"""From a path to the directory it lies in: passed on, such a path tells of nothing; returned or kept, it may
be how somebody else finds the directory."""


SPELT = ".+"
"""From a text to the path that is spelt in it: the same, but it may be the path itself with a slash."""


ON_EXIT = "<exit>"
"""From a stack of exits (`contextlib.ExitStack`) to what its end gives back."""

AT = "<at>"
"""From what a table holds under a number to the number: it may say which one it is, or be its memory."""


def without_contents(places: frozenset[Path]) -> frozenset[Path]:
    """But for what lies in a table under the number."""
    return frozenset(place for place in places if place[-1] != AT)


def lies_within(path: Path) -> bool:
    return path[-1] in (WITHIN, SPELT, AT)


def piece_of(node: ast.AST, about: Callable[[Path], bool]) -> str | None:
    """`directory + "/log"` and `Path(directory) / name`, told from other arithmetic. `about` knows the
    directory by its name."""
    if not makes_text(node):
        return None
    divided = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return WITHIN if divided or _goes_on_behind(node, about) else SPELT


def _goes_on_behind(node: ast.AST, about: Callable[[Path], bool]) -> bool:
    """`"%s/%s" % (directory, name)`: a slash and something else stand behind it."""
    match node:
        case ast.BinOp(left=ast.Constant(value=str(form)), op=ast.Mod(), right=given):
            names = given.elts if isinstance(given, ast.Tuple) else [given]
            texts = re.split(r"%s", form)[1:]
            if len(texts) != len(names) or any("%" in text for text in texts):
                return False
            follows = (index + 1 < len(texts) or text != "/" for index, text in enumerate(texts))
            within = (text.startswith("/") and more for text, more in zip(texts, follows, strict=True))
            told = (isinstance(name, ast.Name) and about((name.id,)) for name in names)
            return [inside for inside, it in zip(within, told, strict=True) if it] == [True]
    return False


def makes_text(node: ast.AST) -> bool:
    """`directory + "/log"`, `"%s/log" % directory`, `Path(directory) / name`."""
    if not isinstance(node, ast.BinOp) or any(isinstance(part, ast.Call) for part in (node.left, node.right)):
        return False
    if isinstance(node.op, ast.Div):
        return True
    return isinstance(node.op, (ast.Add, ast.Mod)) and (_is_text(node.left) or _is_text(node.right))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def tells_nothing(at: ast.AST) -> bool:
    """`slot % size` is the same for many slots."""
    return isinstance(at, ast.BinOp) and isinstance(at.op, ast.Mod) and not isinstance(at.left, ast.Constant)
