"""What each place of a table says when it is made: whoever writes that again has emptied the place.

self.state = [MapState.IDLE] * n            # and later self.state[index] = MapState.IDLE
self.cells = [["."] * width for _ in cards] # and later self.cells[card][a:b] = ["."] * n
self.owner = torch.full((slots,), -1)
"""

import ast
import re
from collections.abc import Iterator

from auditor.project.code.bindings import assignments, own_attribute
from auditor.project.code.modules import Class, last_part

FILLED = re.compile(r"\bfull\(|\bfromkeys\(|\] \* |\bfor \w+ in ")
"""What the text of a method that makes such a table contains."""


def is_born_as(cls: Class | None, field: str, value: ast.expr) -> bool:
    """Plain numbers, None and False say so themselves, or say the opposite: `free = [True] * n`."""
    one = _one_of(value)
    if cls is None or (isinstance(one, ast.Constant) and not isinstance(one.value, str)):
        return False
    born = list(_born(cls, field))
    return bool(born) and ast.unparse(one) in born


def _born(cls: Class, field: str) -> Iterator[str]:
    for name in ("__init__", "reset", "clear"):
        method = cls.methods.get(name)
        if method is None or not FILLED.search(method.text):
            continue
        for target, value in assignments(method):
            if own_attribute(target, method.owner or "") == field:
                one = _one_of(value)
                if one is not value:
                    yield ast.unparse(one)


def _one_of(value: ast.expr) -> ast.expr:
    """`v` of `[v] * n`, `[[v] * n for _ in rows]`, `full(n, v)`, `dict.fromkeys(keys, v)`."""
    match value:
        case ast.BinOp(left=ast.List(elts=[each]), op=ast.Mult()):
            return _one_of(each)
        case ast.BinOp(right=ast.List(elts=[each]), op=ast.Mult()):
            return _one_of(each)
        case ast.ListComp(elt=each) | ast.DictComp(value=each):
            return _one_of(each)
        case ast.Call(args=[_, each, *_]) if last_part(value.func) in ("full", "fromkeys"):
            return _one_of(each)
    return value
