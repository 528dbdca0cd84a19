"""Who has only borrowed what others gave him: functions of the tree, and what a class or a file asks somebody
for of whom nothing is known, `self.transport.recv(root, tag)`, `kernel.run(page)`."""

import ast
from collections.abc import Iterator, Set

from auditor.ir.ops import Assume, Call, Move, Path
from auditor.project.code.bindings import own_attribute
from auditor.project.code.calls import Calls
from auditor.project.code.modules import Class, Function, Module, last_part
from auditor.project.code.release_names import looks_releasing
from auditor.protocols.vocabulary import KEEPING, STORING, split

_HANDING = frozenset(
    {"post", "give", "hand", "pass", "transfer", "move", "donate", "own", "adopt", "take", "queue", "defer",
     "start", "emit", "connect", "open", "bind", "hold", "keep", "track", "note", "retire", "finish", "end",
     "complete", "close", "free", "return", "release", "drop", "ack", "done", "send", "notify", "wrap",
     "deliver", "exchange", "replace", "swap", "switch"}
)  # fmt: skip
"""Words of names by which something may go to somebody else, or end."""

_KEPT = _HANDING.union(each for each in STORING if "_" not in each)

Called = Function | tuple[Class | Module, str]
"""A function of the tree; or what a class or a file calls so, `kernel.*` for whatever it asks the kernel,
`*.run` for whoever is asked to run."""


class Asks:
    """The calls of one function, by whom they ask."""

    def __init__(self, function: Function, calls: Calls) -> None:
        self.function = function
        self.calls = calls

    def a_borrower(self, node: int, borrowers: Set[Called]) -> bool:
        """One of these, or the same object for other work."""
        called = self._called(node)
        return bool(called) and all(self._borrows(each, node, borrowers) for each in called)

    def shown_by(self, node: int) -> Iterator[Called]:
        """Of which borrowers the call speaks, if it has only borrowed."""
        for called in self._called(node):
            yield called
            if isinstance(called, tuple):
                yield self._by_its_last_name(called[1])
            if isinstance(called, tuple) and "." in called[1]:
                yield called[0], f"{called[1].rpartition('.')[0]}.*"

    def _by_its_last_name(self, text: str) -> Called:
        """`engine.step(row)`, where a method of the same file has its `self.step(row)` borrow it."""
        return self.function.module, f"*.{text.rpartition('.')[2]}"

    def _borrows(self, called: Called, node: int, borrowers: Set[Called]) -> bool:
        """A class calls its own fields by one name; `book` may be another book in another function."""
        op = self.function.graph.ops[node]
        if isinstance(called, Function) or not isinstance(op, Call):
            return called in borrowers
        scope, text = called
        if called in borrowers and isinstance(scope, Class):
            return True
        alike = called in borrowers or (scope, f"{text.rpartition('.')[0]}.*") in borrowers
        if not isinstance(scope, Class):  # of another class nobody knows what it has under this name
            alike = alike or self._by_its_last_name(text) in borrowers
        return alike and not may_keep(op.at)

    def _called(self, node: int) -> Set[Called]:
        """Not of somebody unknown whose answer is asked, since that may say what he has done."""
        op = self.function.graph.ops[node]
        if not isinstance(op, Call):
            return frozenset()
        targets = self.calls.targets(self.function, op.at)[0]
        whose = self._of_others(op.at.func)
        if targets or whose is None:
            return frozenset(targets)
        return frozenset() if self._is_asked(op.target) else frozenset({whose})

    def _of_others(self, func: ast.expr) -> Called | None:
        own, cls = self.function.owner or "", self.function.cls
        field = own_attribute(func, own)
        if field is None and isinstance(func, ast.Attribute) and (whose := own_attribute(func.value, own)):
            field = f"{whose}.{func.attr}"
        if field is not None:
            return (cls, field) if cls is not None else None
        match func:
            case ast.Attribute(value=ast.Name() | ast.Attribute(value=ast.Name())):
                return self.function.module, ast.unparse(func)
        return None

    def _is_asked(self, answer: Path) -> bool:
        ops = self.function.graph.ops
        names = {answer, *(op.target for op in ops if isinstance(op, Move) and op.source == answer)}
        asked = [op for op in ops if isinstance(op, Assume)]
        return any(op.subject in names or not op.names.isdisjoint(name[0] for name in names) for op in asked)


def may_keep(call: ast.Call) -> bool:
    """Whether its name says that it keeps what it is told, hands it on or ends it."""
    method = last_part(call.func)
    kept = method in STORING or KEEPING.match(method) is not None or looks_releasing(call)
    return kept or not _KEPT.isdisjoint(split(method))
