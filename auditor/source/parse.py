"""How a text becomes a syntax tree: who reads one text twice gives both readers a `Parse` that remembers."""

import ast
from collections.abc import Callable
from functools import cache

Parse = Callable[[str], ast.Module]


def remembering() -> Parse:
    """`ast.parse`, once a text. Trees are large: this is for as long as all of them are needed."""
    return cache(lambda text: ast.parse(text))
