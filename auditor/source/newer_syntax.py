"""Syntax newer than the running Python, told in older words that mean the same to the analysis.

Python 3.11 cannot parse PEP 695 (`def f[T]`, `type X = ...`) or PEP 701 (an f-string's own quotes inside
its braces); libcst can, whatever it runs on. Type parameters go, `type X = V` becomes `X = V`, and an
f-string that the older grammar refuses becomes the tuple of what it evaluates. Lines stay where they are;
columns may move on the lines that changed."""

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import libcst

DEEPEST = 60
"""libcst's native parser can end the process on absurd nesting; nobody nests brackets so deep by hand."""


def in_older_syntax(text: str) -> str | None:
    """The text as this Python can parse it; None where it is wrong in any Python."""
    if bracket_depth(text) > DEEPEST:
        return None
    import libcst

    try:
        older = libcst.parse_module(text).visit(_translator()).code
        ast.parse(older)
    except (libcst.ParserSyntaxError, SyntaxError, ValueError, RecursionError):
        return None
    return older if older.count("\n") == text.count("\n") else None


def bracket_depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _translator() -> "libcst.CSTTransformer":
    import libcst

    class Translator(libcst.CSTTransformer):
        def leave_FunctionDef(
            self, original_node: libcst.FunctionDef, updated_node: libcst.FunctionDef
        ) -> libcst.FunctionDef:
            return updated_node.with_changes(type_parameters=None)

        def leave_ClassDef(
            self, original_node: libcst.ClassDef, updated_node: libcst.ClassDef
        ) -> libcst.ClassDef:
            return updated_node.with_changes(type_parameters=None)

        def leave_TypeAlias(
            self, original_node: libcst.TypeAlias, updated_node: libcst.TypeAlias
        ) -> libcst.Assign:
            return libcst.Assign([libcst.AssignTarget(updated_node.name)], updated_node.value)

        def leave_FormattedString(
            self, original_node: libcst.FormattedString, updated_node: libcst.FormattedString
        ) -> libcst.BaseExpression:
            text = libcst.Module([]).code_for_node(updated_node)
            if _parses(text):
                return updated_node
            parts = [
                p.expression for p in updated_node.parts if isinstance(p, libcst.FormattedStringExpression)
            ]
            lines = text.count("\n")
            inner = ", ".join(libcst.Module([]).code_for_node(part) for part in parts)
            padding = "\n" * (lines - inner.count("\n"))
            return libcst.parse_expression(f"({inner},{padding})" if parts else '""')

    return Translator()


def _parses(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True
