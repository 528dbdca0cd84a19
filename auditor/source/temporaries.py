"""Which allocations of a method may be pooled: they neither leave it nor are kept by autograd."""

import ast

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Their result shares the argument's memory, so a name bound to it is one more name for the same tensor.
_VIEWS = frozenset(
    "view reshape transpose permute unsqueeze squeeze flatten unflatten narrow select expand expand_as view_as"
    " t chunk split unbind detach contiguous movedim swapaxes diagonal to type_as".split()
)
_WRITES = frozenset("copy_ fill_ zero_ normal_ uniform_ index_copy_ triu_ tril_".split())
_READS = frozenset("size dim numel data_ptr stride is_contiguous element_size storage_offset get_device".split())


class Temporaries:
    """One method's names, read once: which of them stay inside."""

    def __init__(self, method: Function) -> None:
        self._no_grad = _without_grad(method)
        self._parents = {child: parent for parent in ast.walk(method) for child in ast.iter_child_nodes(parent)}
        self._uses: dict[str, list[ast.Name]] = {}
        for node in ast.walk(method):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._uses.setdefault(node.id, []).append(node)

    def holds(self, made: ast.expr) -> bool:
        """Whether the tensor `made` is bound to a local name all of whose uses keep it inside the method."""
        names = self._bound(made)
        if not names:
            return False
        seen: set[str] = set()
        while names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            for use in self._uses.get(name, ()):
                follow = self._follow(use)
                if follow is None:
                    return False
                names |= follow
        return True

    def _bound(self, made: ast.expr) -> set[str]:
        follow = self._follow(made)
        return follow or set()

    def _follow(self, node: ast.expr) -> set[str] | None:
        """The names that hold the tensor after this use of it; None where it leaves or is kept."""
        parent = self._parents.get(node)
        match parent:
            case ast.Assign(targets=targets) if parent.value is node:
                if all(isinstance(target, ast.Name) for target in targets):
                    return {target.id for target in targets if isinstance(target, ast.Name)}
                return None if any(_stores(target) for target in targets) else set()
            case ast.AnnAssign(target=ast.Name(id=name)):
                return {name}
            case ast.Subscript(ctx=ast.Store()) | ast.Subscript(ctx=ast.Del()):
                return set()
            case ast.Subscript(value=value) if value is node:
                return self._follow(parent)
            case ast.Attribute(attr="shape" | "device" | "dtype" | "ndim" | "is_cuda" | "requires_grad"):
                return set()
            case ast.Attribute(attr="T" | "mT" | "H" | "data"):
                return self._follow(parent)
            case ast.Attribute(attr=name):
                return self._follow_method(parent, name)
            case ast.AugAssign(op=ast.Add() | ast.Sub()) | ast.Expr() | ast.Compare() | ast.Delete():
                return set()
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return set()
            case ast.Call() | ast.keyword():
                return self._follow_argument(parent, node)
        return set() if self._no_grad and isinstance(parent, ast.BinOp) else None

    def _follow_method(self, attribute: ast.Attribute, name: str) -> set[str] | None:
        call = self._parents.get(attribute)
        if not isinstance(call, ast.Call) or call.func is not attribute:
            return None
        if name in _READS:
            return set()
        if name in _VIEWS or name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            return self._follow(call)
        return set() if name in ("sum", "add", "sub", "clone", "numpy", "tolist", "item", "cpu") or self._no_grad else None

    def _follow_argument(self, parent: ast.Call | ast.keyword, node: ast.expr) -> set[str] | None:
        if isinstance(parent, ast.keyword):
            return set() if parent.arg in ("out", "output", "out_tensor", "output_tensor") else None
        callee = ast.unparse(parent.func)
        name = callee.rpartition(".")[2]
        if name in ("cat", "stack", "copy_", "len", "add", "sub", "zeros_like", "empty_like", "ones_like"):
            return set()
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce", "broadcast"):
            return set()
        return set() if self._no_grad and callee.startswith(("torch.", "F.")) else None


def _stores(target: ast.expr) -> bool:
    """Whether assigning to this target keeps the tensor: fields and containers do, `x[...] = t` may copy."""
    return isinstance(target, ast.Attribute | ast.Tuple | ast.List | ast.Subscript | ast.Starred)


def _without_grad(method: Function) -> bool:
    return any("no_grad" in text or "inference_mode" in text for text in map(ast.unparse, method.decorator_list))
