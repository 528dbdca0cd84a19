"""How a text becomes a syntax tree: who reads one text twice gives both readers a `Parse` that remembers."""

import ast
from collections.abc import Callable
from functools import cache

Parse = Callable[[str, str], ast.Module]
"""Of a text, and the path of its file: nodes are told apart by who they are, so files that say the same have
trees of their own."""


def remembering() -> Parse:
    """`ast.parse`, once a file. Trees are large: this is for as long as all of them are needed."""
    return cache(lambda text, path: ast.parse(text, path))
