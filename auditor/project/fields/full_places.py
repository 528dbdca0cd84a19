"""Places that are full when something is put there: those of a list that only grows by what it is given, and
fields of records which another function refuses to fill twice."""

import ast
import re
from collections.abc import Iterable, Iterator

from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Function
from auditor.project.code.project import Project
from auditor.project.fields.filling_again import LEAVING, Filling, fillings, is_none, made_of, same
from auditor.project.fields.reckoning import comes_in_pairs, lent_alike, told_by_its_caller
from auditor.protocols.vocabulary import split

RESUMING = re.compile(r"_*(?:re(?:sume|store|vive|cover|join|turn)|un\w+|wake\w*|continue|try|ensure)(?:_|$)")
"""Methods whose callers come when the first lease has been given back, or when there may be none."""


def is_in_a_list(filling: Filling, project: Project) -> bool:
    """`seq.blocks[-1] = fresh` of a list that is only appended to, `self.kept[i] = fresh` of one of its own:
    there is one, or Python would raise."""
    if filling.key is None or not (_is_number(filling.key) or _appends_itself(filling)):
        return False
    named = re.compile(rf"\.{filling.field}\b")
    speaking = [
        function
        for module in project.parsed()
        if filling.field in module.text and named.search(module.text)
        for function in list(module.by_node.values())
        if filling.field in function.text
    ]
    grown = [each for function in speaking for each in _grown_by(function, filling.field)]
    return bool(grown) and not any(_holds_none(function, filling.field) for function in speaking)


def _is_number(key: ast.expr) -> bool:
    match key:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int())) | ast.Constant(value=int()):
            return True
    return False


def _appends_itself(filling: Filling) -> bool:
    """`if len(self.kept) < self.most: self.kept.append(row)`, in the same method or another of the class."""
    method = filling.method
    family = method.cls.methods.values() if method.cls is not None and filling.owner == method.owner else ()
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "append"
        and own_attribute(call.func.value, each.owner or "") == filling.field
        for each in family
        for call in each.calls
    )


def _grown_by(function: Function, field: str) -> Iterator[ast.expr]:
    """`pages.append(page)`, `pages.extend(fresh)`, `pages += fresh`."""
    for node in function.nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr=attr), attr="append" | "extend"), args=[put]
            ) if attr == field:
                yield put
            case ast.AugAssign(target=ast.Attribute(attr=attr), op=ast.Add(), value=value) if attr == field:
                yield value


def _holds_none(function: Function, field: str) -> bool:
    """`self.pages.append(None)`, `self.pages[i] = None`, `self.pages = [None] * n`: a place may be empty."""
    if any(map(_has_nothing, _grown_by(function, field))):
        return True
    for node in function.statements:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        whole = {getattr(each, "attr", "") for each in targets}
        places = {getattr(getattr(each, "value", None), "attr", "") for each in targets}
        emptied = field in whole and is_none(value)
        if value is not None and field in whole | places and not emptied and _has_nothing(value):
            return True
    return False


def _has_nothing(value: ast.expr) -> bool:
    """None, 0, -1 and their like, alone or in a list, many times."""
    match value:
        case ast.Constant() | ast.UnaryOp():
            return True
        case ast.List(elts=elements):
            return any(map(_has_nothing, elements))
        case ast.BinOp(op=ast.Mult()):
            return True
        case ast.ListComp(elt=each):
            return _has_nothing(each)
    return False


def is_refused_elsewhere(filling: Filling, call: ast.Call, project: Project) -> bool:
    """`if req.lease is not None: return False` in `admit(req)`: who comes with such a request again, and does
    not say so by its name, has one. So has the table of one under a name that its caller tells, where another
    method refuses `if name in draft.files`."""
    told = filling.key is None or told_by_its_caller(filling)
    if not told or RESUMING.match(filling.method.name):
        return False
    attribute = f".{filling.field}"
    paired = comes_in_pairs(filling.method.name)
    return any(
        _refuses(function, filling.field, call)
        for module in project.parsed()
        if attribute in module.text
        for function in list(module.by_node.values())
        if function is not filling.method and attribute in function.text
        if not paired or (filling.key is not None and _is_called_alike(function, filling.method))
    )


def _is_called_alike(one: Function, other: Function) -> bool:
    """`attach_existing` and `attach`: whatever comes after these, one of them expects to be too late."""
    return split(one.name)[:1] == split(other.name)[:1]


def _refuses(function: Function, field: str, call: ast.Call) -> bool:
    for owner in function.parameters:
        for other in fillings(function, owner, field) if owner != function.owner else ():
            asking = _leaving_before(function.statements, other)
            if any(_is_full(test, other) for test in asking) and lent_alike(other, call):
                return True
    return False


def _leaving_before(statements: Iterable[ast.stmt], filling: Filling) -> Iterator[ast.expr]:
    for node in statements:
        if isinstance(node, ast.If) and node.lineno < filling.line and isinstance(node.body[-1], LEAVING):
            yield node.test


def _is_full(test: ast.expr, filling: Filling) -> bool:
    match test:
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_is_full(each, filling) for each in values)
        case ast.Compare(left=key, ops=[ast.In()], comparators=[table]) if filling.key is not None:
            its = own_attribute(table, filling.owner) == filling.field
            return its and same(made_of(filling.method, key), filling.key)
        case ast.Compare(left=asked, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return filling.key is None and own_attribute(asked, filling.owner) == filling.field
    return filling.key is None and own_attribute(test, filling.owner) == filling.field
