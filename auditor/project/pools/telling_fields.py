"""Fields that tell about an object which a pool lends, and lead nobody back to it: `channel.sent`."""

import ast
import re
from collections.abc import Iterator

from auditor.flow.effects import Handle, Value
from auditor.project.code.annotations import type_named
from auditor.project.code.bindings import assignments, own_attribute, own_name
from auditor.project.code.class_model import ClassModel
from auditor.project.code.modules import Class, Function
from auditor.project.pools.halves import Half, Pair
from auditor.project.pools.lent_objects import lent_class

PLAIN = re.compile(r"(?:Optional\[)?(?:int|float|bool|str|bytes|(?:torch\.)?Tensor|(?:np|numpy)\.ndarray)\b")
"""Annotations of what cannot hold the object that it is a field of."""


def telling_fields(model: ClassModel, pair: Pair) -> frozenset[str]:
    """As pieces of paths: `.sent`. None where the pool takes back less than the object, or knows it by the
    field."""
    lent = {
        lent_class(model, pair.owner, half.function)
        for half in pair.acquires
        if pair.owner is not None and half.handle is Handle.RESULT and half.value is Value.OBJECT
    }
    cls = lent.pop() if len(lent) == 1 else None
    if cls is None or pair.owner is None or not all(_wants(model, half, cls) for half in pair.releases):
        return frozenset()
    plain = {name for each in model.lineage(cls) for name in _plain_fields(each)}
    books = pair.owner.text
    return frozenset(f".{name}" for name in plain if not re.search(rf"[\[(,]\s*\w+\.{name}\s*[\]),]", books))


def _wants(model: ClassModel, half: Half, cls: Class) -> bool:
    """Whether it is given the object itself."""
    if half.handle is Handle.RECEIVER:
        return True
    arguments = getattr(half.function.node, "args", None)
    for told in arguments.args[1:] if arguments is not None else ():
        if told.annotation is not None:
            found = type_named(model.project, (half.function.module, told.annotation))
            if isinstance(found, Class) and cls in model.lineage(found) + model.lineage(cls)[:1]:
                return True
        if re.search(rf"\b{told.arg}\.\w+", half.function.text):
            return True
    return False


def _plain_fields(cls: Class) -> Iterator[str]:
    for node in cls.node.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if PLAIN.match(ast.unparse(annotation)):
                    yield name
    init = cls.methods.get("__init__")
    if init is not None:
        yield from _set_plainly(init)


def _set_plainly(init: Function) -> Iterator[str]:
    """`self.sent = 0`, and `self.rank = rank` of an annotated parameter."""
    own = own_name(init) or ""
    arguments = getattr(init.node, "args", None)
    told = {each.arg for each in arguments.args if _is_plain(each.annotation)} if arguments else set()
    for target, value in assignments(init):
        name = own_attribute(target, own)
        if name is None:
            continue
        constant = isinstance(value, ast.Constant) and value.value is not None
        if constant or (isinstance(value, ast.Name) and value.id in told):
            yield name


def _is_plain(annotation: ast.expr | None) -> bool:
    return annotation is not None and PLAIN.match(ast.unparse(annotation)) is not None
