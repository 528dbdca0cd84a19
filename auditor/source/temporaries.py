"""Which allocations of a method may be pooled: they neither leave it nor are kept by autograd."""

import ast

from auditor.source.nodes import children, every_node

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Their result shares the argument's memory, or may, so what it is bound to is one more name for it.
_VIEWS = frozenset(
    (
        "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "unflatten",
        "narrow", "select", "expand", "expand_as", "view_as", "t", "chunk", "split", "unbind", "detach",
        "contiguous", "movedim", "swapaxes", "diagonal", "to", "type_as", "float", "half",
        "dropout", "cpu", "numpy",
    )
)  # fmt: skip
# Autograd keeps nothing of the tensor itself for these: sums keep nothing, softmax keeps its result,
# masked_fill its mask.
_KEEPS_NOTHING = frozenset(
    (
        "add", "sub", "sum", "mean", "softmax", "log_softmax", "exp", "sigmoid", "tanh", "relu", "cat",
        "stack", "clone", "cumsum", "roll", "flip", "repeat", "masked_fill", "argmax",
        "argmin", "any", "all", "isnan", "isinf", "eq", "ne", "lt", "gt", "le", "ge", "copy_",
        "zeros_like", "empty_like", "ones_like", "full_like", "len", "tolist", "item",
        "size", "dim", "numel", "data_ptr", "stride", "is_contiguous", "gather", "index_select",
        "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce",
        "broadcast", "isend", "irecv", "send", "recv",
    )
)  # fmt: skip
_OUTPUTS = frozenset(("out", "output", "out_tensor", "output_tensor"))
_DESCRIPTIONS = frozenset(("shape", "device", "dtype", "ndim", "is_cuda", "requires_grad", "layout"))


class Temporaries:
    """One method, read once: for each tensor born in it, whether all its uses keep it inside."""

    def __init__(self, method: Function) -> None:
        self._parents = {child: parent for parent in every_node(method) for child in children(parent)}
        self._no_grad = any(_is_no_grad(each) for each in method.decorator_list)
        self._uses: dict[str, list[ast.Name]] = {}
        for node in self._parents:
            if (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Load)
                and not self._asks_identity(node)
            ):
                self._uses.setdefault(node.id, []).append(node)

    def holds(self, made: ast.expr) -> bool:
        """Whether `made` is bound to local names that are used, and none of the uses returns, stores or
        keeps it.
        """
        waiting = self._names_after(made) or set()
        if not waiting:
            return False
        if not any(name in self._uses for name in waiting):
            return False  # a default that nobody reads is no work for a pool
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            uses = self._uses.get(name, [])
            untracked = self._no_grad or any(self._is_output(use) for use in uses)
            for use in uses:
                names = self._names_after(use, untracked or self._under_no_grad(use))
                if names is None:
                    return False
                waiting |= names
        return True

    def _names_after(self, node: ast.expr, untracked: bool = False) -> set[str] | None:
        """The names that hold the tensor after this use of it; None where it leaves or autograd keeps it."""
        parent = self._parents.get(node)
        match parent:
            case ast.Assign(targets=targets, value=value) if value is node:
                return _bound_names(targets)
            case ast.AnnAssign(target=ast.Name(id=name)):
                return {name}
            case ast.Subscript(value=value, ctx=ast.Load()) if value is node:
                return self._names_after(parent, untracked)
            case ast.Attribute(attr=name):
                return self._after_attribute(parent, name, untracked)
            case ast.Call() | ast.keyword():
                return self._after_argument(parent, node, untracked)
            case ast.BinOp(op=ast.Add() | ast.Sub()) | ast.AugAssign(op=ast.Add() | ast.Sub()):
                return set()
            case ast.BinOp(left=left, right=right) if untracked or _is_number(
                right if left is node else left
            ):
                return set()
            case ast.Subscript() | ast.Expr() | ast.Compare() | ast.Delete() | ast.Assert():
                return set()
        return None

    def _after_attribute(self, attribute: ast.Attribute, name: str, untracked: bool) -> set[str] | None:
        if name in _DESCRIPTIONS:
            return set()
        if name in ("T", "mT", "H", "data"):
            return self._names_after(attribute, untracked)
        call = self._parents.get(attribute)
        if not isinstance(call, ast.Call) or call.func is not attribute:
            return None
        in_place = name.endswith("_") and not name.endswith("__")
        if name in _VIEWS or in_place:
            return self._names_after(call, untracked)
        return set() if untracked or name in _KEEPS_NOTHING else None

    def _after_argument(
        self, parent: ast.Call | ast.keyword, node: ast.expr, untracked: bool
    ) -> set[str] | None:
        if isinstance(parent, ast.keyword):
            return set() if parent.arg in _OUTPUTS else None
        callee = ast.unparse(parent.func)
        name = callee.rpartition(".")[2]
        if name in _VIEWS and parent.args[:1] == [node]:
            return self._names_after(parent, untracked)
        if name in _KEEPS_NOTHING and (name != "masked_fill" or parent.args[0] is node):
            return set()
        return set() if untracked and callee.startswith(("torch.", "F.", "dist.")) else None

    def _asks_identity(self, name: ast.Name) -> bool:
        """`mask is None` reads no tensor."""
        parent = self._parents.get(name)
        return isinstance(parent, ast.Compare) and all(
            isinstance(op, ast.Is | ast.IsNot) for op in parent.ops
        )

    def _is_output(self, use: ast.Name) -> bool:
        """`torch.op(..., out=name)`: torch refuses that for tensors whose gradient it tracks."""
        parent = self._parents.get(use)
        return isinstance(parent, ast.keyword) and parent.arg == "out"

    def _under_no_grad(self, node: ast.AST) -> bool:
        while (parent := self._parents.get(node)) is not None:
            if isinstance(parent, ast.With) and any(_is_no_grad(item.context_expr) for item in parent.items):
                return True
            node = parent
        return False


def _bound_names(targets: list[ast.expr]) -> set[str] | None:
    """Names only: a field or a container may outlive the method."""
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names if len(names) == len(targets) else None


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and _is_number(node.operand))


def _is_no_grad(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return "no_grad" in text or "inference_mode" in text
