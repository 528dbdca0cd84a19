"""Files that stand for a lock: one method makes one that must not be there, `os.open(path, os.O_CREAT |
os.O_EXCL)`, and another one deletes it. Their names count only in so far as a file whose names say nothing is
not read at all."""

import ast
import re
from collections.abc import Iterator, Sequence

from auditor.flow.effects import Handle
from auditor.project.code.bindings import own_attribute
from auditor.project.code.modules import Class, Function
from auditor.project.pools.halves import LENDING, Half, Pair
from auditor.project.shapes.field_work import field_work
from auditor.project.shapes.pool_state import own_parameters
from auditor.protocols.vocabulary import Name
from auditor.source.nodes import walk

EXCLUSIVE = re.compile(r"\bO_EXCL\b|open\([^)\n]*[\"']xb?[\"']|touch\([^)\n]*exist_ok=False")
_ITS_WORDS = ("O_EXCL", "open(", "touch(")  # quickly looked for: the pattern begins with no literal
DELETING = frozenset({"unlink", "remove", "rmdir"})


def lock_file_pairs(cls: Class, methods: Sequence[Function], paired: set[Function]) -> Iterator[Pair]:
    """Of a path that the object has, `self.path`, it is the object that is locked; or the path is what the
    first returns and the second is told."""
    if not any(map(cls.text.__contains__, _ITS_WORDS)) or EXCLUSIVE.search(cls.text) is None:
        return
    for begins in methods:
        if begins in paired or EXCLUSIVE.search(begins.text) is None or not _may_lock(begins):
            continue
        for ends in methods:
            handle = _handle(begins, ends) if ends is not begins and ends not in paired else None
            if handle is not None:
                half = Half(begins, Name("acquire", frozenset()), handle, by_shape=True)
                yield Pair(cls.name, cls, (half,), (Half(ends, Name("release", frozenset()), handle),))
                break


def _may_lock(method: Function) -> bool:
    return LENDING.isdisjoint(method.decorators) and not method.name.startswith("__")


def _handle(begins: Function, ends: Function) -> Handle | None:
    own = begins.owner or ""
    returned = {ast.unparse(value) for value in field_work(begins).returned}
    made = {
        node.attr for node in walk(begins.node) if isinstance(node, ast.Attribute) if own_attribute(node, own)
    }
    for deleted in _deleted(ends):
        if own_attribute(deleted, ends.owner or "") in made and not own_parameters(ends):
            return Handle.RECEIVER if returned <= {"True", "False"} else None
        if getattr(deleted, "id", None) in own_parameters(ends) and returned - {"None", "True", "False"}:
            return Handle.RESULT
    return None


def _deleted(method: Function) -> Iterator[ast.expr]:
    """`path` of `path.unlink()`, of `os.unlink(path)`."""
    for call in method.calls:
        match call.func:
            case ast.Attribute(value=ast.Name(id="os"), attr=way) if way in DELETING and call.args:
                yield call.args[0]
            case ast.Attribute(value=of, attr="unlink" | "rmdir"):
                yield of
