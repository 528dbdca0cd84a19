"""Calls: who is called with what, and whether it can be expected to raise."""

import ast

from auditor.ir.iterations import IterationLowering
from auditor.ir.ops import ANY_ITEM, Call, Move, Path
from auditor.ir.tables import GOING_OVER

LOGGING = frozenset({"debug", "info", "warning", "warn", "error", "exception", "critical", "log"})

PUTTING = frozenset({"append", "appendleft", "add", "put", "put_nowait"})
"""Methods that put one thing into a list, a set or a queue."""

QUIET_CALLS = frozenset(
    {
        "isinstance", "issubclass", "len", "id", "type", "hasattr", "callable", "print", "range", "repr",
        "str", "bool",
        "tuple", "list", "dict", "set", "frozenset", "enumerate", "zip", "reversed", "super",
        "perf_counter", "monotonic", "time", "time_ns",
        "perf_counter_ns", "closing", "aclosing", "nullcontext", "ExitStack", "AsyncExitStack", "callback",
        "push_async_callback", "suppress", "append", "extend", "insert", "update", "appendleft", "add",
        "discard", "clear", "items", "values", "keys", "setdefault",
        "size", "dim", "data_ptr", "numel", "is_contiguous", "element_size", "startswith", "endswith", "cast",
        "c_void_p", "c_int", "c_size_t", "c_uint64",
    }
)  # fmt: skip
"""Calls that practice never sees raise: an exception edge out of each would bury the ones that matter."""


class CallLowering(IterationLowering):
    """Lowers calls."""

    def value_Call(self, node: ast.Call, *, entered: bool = False) -> Path:
        if getattr(node.func, "id", "") == "super" and self.scope.parameters:
            return (self.scope.parameters[0],)
        read = self._attribute_read(node)
        if read is not None:
            return read
        receiver = callee = None
        method = ""
        if isinstance(node.func, ast.Attribute):
            receiver = self.value(node.func.value)
            method = node.func.attr
            callee = (*receiver, "." + method)
        else:
            callee = self.value(node.func)
            method = node.func.id if isinstance(node.func, ast.Name) else ""
        args = tuple((self.value(arg), isinstance(arg, ast.Starred)) for arg in node.args)
        if callee is not None and method in GOING_OVER and receiver is None:
            args = tuple((self.copied(path), starred) for path, starred in args)
        kwargs = tuple((keyword.arg, self.value(keyword.value)) for keyword in node.keywords)
        target = self.builder.temporary()
        call = Call(node, target, callee, receiver, method, args, kwargs, entered)
        if is_quiet(node):
            self.builder.emit(call)
        else:
            self.builder.emit_raising(call)
        if (name := self.looked_at.get(id(node))) is not None:
            self.builder.emit(Move(node, target, (self.root(name),)))
        return self._row_of(node, receiver) or target

    def _row_of(self, node: ast.Call, receiver: Path | None) -> Path | None:
        """`rows.setdefault(key, {})` is the row that the table has under the key: `rows[key]`."""
        match node:
            case ast.Call(func=ast.Attribute(attr="setdefault"), args=[_, ast.List() | ast.Dict()]):
                return (*receiver, ANY_ITEM) if receiver is not None else None
        return None

    def _attribute_read(self, node: ast.Call) -> Path | None:
        """`getattr(x, "name", default)` reads an attribute."""
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                return (*self.value(owner), "." + name)
        return None


def is_quiet(node: ast.Call) -> bool:
    """Whether practice never sees this call raise."""
    match node.func:
        case ast.Attribute(attr=method, value=receiver):
            if method in LOGGING:
                return "log" in (getattr(receiver, "attr", "") or getattr(receiver, "id", "")).lower()
            computes = method == "add" and (len(node.args) > 1 or node.keywords)  # `torch.add(a, b, out=a)`
            return method in QUIET_CALLS and not computes
        case ast.Name(id=name):
            return name in QUIET_CALLS or name.endswith(("Error", "Exception", "Warning"))
    return False
