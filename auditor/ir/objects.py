"""Parameters that are an object or None, by what is said of them: a false one is taken for None."""

import ast

from auditor.ir.scope import FunctionNode
from auditor.source.nodes import walk

SIZED = frozenset({"List", "Dict", "Set", "FrozenSet", "Tuple", "Sequence", "Iterable", "Mapping",
                   "Collection", "Deque", "DefaultDict", "OrderedDict", "Counter", "Tensor", "Any", "AnyStr",
                   "Text", "T", "Number", "Decimal", "Fraction", "Series", "DataFrame"})  # fmt: skip
"""Classes of which an object may be false, and names that stand for any."""


def objects_or_none(function: FunctionNode) -> frozenset[str]:
    """`scratch: Optional[Buffer] = None`, `scratch: Buffer | None`, of names that are bound to nothing
    else."""
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return frozenset()
    args = function.args
    parameters = (*args.posonlyargs, *args.args, *args.kwonlyargs)
    told = {each.arg for each in parameters if _is_one(each.annotation)}
    written = {
        node.id
        for node in (walk(function) if told else ())
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    return frozenset(told - written)


def _is_one(annotation: ast.expr | None) -> bool:
    match annotation:
        case ast.Constant(value=str(text)):
            return _is_one(_parsed(text))
        case ast.Subscript(value=ast.Name(id="Optional") | ast.Attribute(attr="Optional"), slice=kind):
            return _is_a_class(kind)
        case ast.BinOp(left=kind, op=ast.BitOr(), right=ast.Constant(value=None)):
            return _is_a_class(kind)
    return False


def _is_a_class(kind: ast.expr) -> bool:
    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
        return _is_a_class(_parsed(kind.value) or kind)
    name = kind.attr if isinstance(kind, ast.Attribute) else getattr(kind, "id", "")
    return name[:1].isupper() and name not in SIZED


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
