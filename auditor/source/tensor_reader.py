"""Reads one method from top to bottom: the shapes of its tensors, and every operation that makes a new
one.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from auditor.source import tensor_ops
from auditor.source.imports import dotted_text
from auditor.source.nodes import children
from auditor.source.shapes import DTYPE_BYTES, Shape, Sizes, shape_owner

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Made:
    """One new tensor. `scores` says the sizes of an attention matrix whose operands' shapes are not known."""

    node: ast.expr
    operation: str
    shape: Shape | None
    item: int | None = None
    scores: str | None = None
    is_factory: bool = False


class TensorReader:
    """`made` lists what the method allocates; views, reshapes and in-place operations make nothing."""

    def __init__(self, origins: dict[str, str]) -> None:
        self.sizes = Sizes()
        self.made: list[Made] = []
        self._origins = origins
        self._parameters: set[str] = set()

    def read(self, method: Function) -> None:
        arguments = method.args
        self._parameters = {
            each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        }
        self._block(method.body)

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[target], value=value):
                self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return  # runs when it is called, with shapes of its own
            case _:
                for child in children(node):
                    self._child(child)

    def _child(self, child: ast.AST) -> None:
        if isinstance(child, ast.expr):
            self.shape_of(child)
        elif isinstance(child, ast.stmt):
            self._statement(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            self._block(child.body)
        elif isinstance(child, ast.withitem):
            self.shape_of(child.context_expr)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            self._unpack(target, value)
            return
        shape = self.shape_of(value)
        if not isinstance(target, ast.Name):
            return
        name = target.id
        self._forget(name)
        if shape is not None:
            self.sizes.shapes[name] = shape
        elif isinstance(value, ast.Constant) and type(value.value) is int:
            self.sizes.numbers[name] = str(value.value)
        elif (read := self.sizes.read_off(value)) is not None:
            self._name_size(name, *read)
        elif (many := self.sizes.sequence(value)) is not None:
            self.sizes.lists[name] = many

    def _forget(self, name: str) -> None:
        for known in (self.sizes.shapes, self.sizes.lists, self.sizes.numbers):
            known.pop(name, None)

    def _name_size(self, name: str, owner: str, index: int) -> None:
        """`n = x.size(1)`: n is a size of the input from here on."""
        shape = self.sizes.shapes.get(owner)
        known = shape is not None and -len(shape.dims) <= index < len(shape.dims)
        if shape is not None and known and shape.dims[index].isdigit():
            self.sizes.numbers[name] = shape.dims[index]
        self.sizes.from_input.add(name)

    def _unpack(self, target: ast.Tuple, value: ast.expr) -> None:
        """`b, n, h, d = q.shape` names q's sizes; `q, k = self.a(x), self.b(x)` is two assignments."""
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._assign(one, other)
            return
        owner, whole = shape_owner(value)
        names = [each.id for each in target.elts if isinstance(each, ast.Name)]
        for name in names:
            self._forget(name)
        if owner is None:
            self.shape_of(value)
            return
        self.sizes.from_input.update(name for name in names if name != "_")
        if whole and len(names) == len(target.elts):
            dims = tuple(f"{owner}.shape[{i}]" if name == "_" else name for i, name in enumerate(names))
            self.sizes.shapes[owner] = Shape(dims)

    def shape_of(self, node: ast.expr) -> Shape | None:
        """The shape of an expression where it can be told; what it allocates on the way is recorded."""
        read = _READ.get(node.__class__, TensorReader._parts)
        return read(self, node)

    def _parts(self, node: ast.expr) -> Shape | None:
        """Of an expression that is no tensor itself, the expressions in it."""
        for child in children(node):
            if isinstance(child, ast.expr):
                self.shape_of(child)
            elif isinstance(child, ast.comprehension):
                self.shape_of(child.iter)
        return None

    def _name(self, node: ast.Name) -> Shape | None:
        return self.sizes.shapes.get(node.id)

    def _nothing(self, node: ast.expr) -> None:
        """A constant has no shape that matters, and a lambda runs when it is called."""

    def _arithmetic(self, node: ast.BinOp) -> Shape | None:
        if isinstance(node.op, ast.MatMult):
            return self._matmul(node, "@", node.left, node.right)
        return self._broadcast(node, node.left, node.right, None)

    def _compare(self, node: ast.Compare) -> Shape | None:
        if len(node.comparators) > 1:
            return self._parts(node)
        return self._broadcast(node, node.left, node.comparators[0], 1)

    def _attribute(self, node: ast.Attribute) -> Shape | None:
        if node.attr in ("T", "mT"):
            shape = self.shape_of(node.value)
            return shape.transposed(-1, -2) if shape is not None and len(shape.dims) > 1 else None
        text = dotted_text(node)
        return self._parts(node) if text is None else self.sizes.shapes.get(text)

    def _subscript(self, node: ast.Subscript) -> Shape | None:
        self.shape_of(node.slice)
        return tensor_ops.indexed(self.shape_of(node.value), node.slice)

    def _call(self, call: ast.Call) -> Shape | None:
        callee = self._callee(call)
        arguments = {word.arg: word.value for word in call.keywords if word.arg}
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if callee in tensor_ops.FACTORIES:
            return self._factory(call, callee, arguments)
        if callee == "torch.arange":
            return self._arange(call, arguments)
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if method in tensor_ops.NEW:
            return self._factory(call, method, arguments)
        is_torch = callee.startswith("torch.")
        operands = list(call.args) if is_torch or receiver is None else [receiver, *call.args]
        operation = callee.rpartition(".")[2] if is_torch else method
        if operation in ("matmul", "bmm") and len(operands) == 2:
            return self._matmul(call, operation, *operands)
        if operation == "einsum" and is_torch:
            return self._einsum(call)
        shapes = [self.shape_of(each) for each in operands]
        for value in arguments.values():
            self.shape_of(value)
        if not shapes or not operation or (not is_torch and receiver is None):
            return None
        return self._operation(call, operation, shapes, operands, arguments)

    def _operation(
        self, call: ast.Call, operation: str, shapes: list[Shape | None], operands: list[ast.expr],
        arguments: dict[str, ast.expr],
    ) -> Shape | None:  # fmt: skip
        if operation in tensor_ops.LIKE:
            shape = shapes[0] or self._activation(operands[0])
            made = replace(shape, item=self._item(arguments) or shape.item) if shape else None
            return self._record(call, operation, made, is_factory=True)
        result = tensor_ops.result(operation, shapes, operands, arguments, self.sizes)
        if result is not None and operation in tensor_ops.MAKES:
            return self._record(call, operation, result)
        return result

    def _activation(self, node: ast.expr) -> Shape | None:
        """What a parameter that is an activation by its name weighs, where its sizes are nowhere written."""
        if not isinstance(node, ast.Name) or node.id not in self._parameters:
            return None
        return Shape((f"{node.id}.numel()",)) if tensor_ops.ACTIVATION.match(node.id) else None

    def _callee(self, call: ast.Call) -> str:
        text = dotted_text(call.func)
        if text is None:
            return ""
        head, dot, rest = text.partition(".")
        return self._origins.get(head, head) + dot + rest

    def _record(
        self, node: ast.expr, operation: str, shape: Shape | None, *, is_factory: bool = False
    ) -> Shape | None:
        if shape is not None:
            self.made.append(Made(node, operation, shape, shape.item, is_factory=is_factory))
        return shape

    def _item(self, arguments: dict[str, ast.expr]) -> int | None:
        dtype = arguments.get("dtype")
        return DTYPE_BYTES.get((dotted_text(dtype) or "").rpartition(".")[2]) if dtype is not None else None

    def _factory(self, call: ast.Call, callee: str, arguments: dict[str, ast.expr]) -> Shape | None:
        operation = callee.rpartition(".")[2]
        sizes = list(call.args)
        if "size" in arguments:
            sizes = [arguments["size"]]
        elif operation in ("full", "new_full"):
            sizes = sizes[:1]
        elif operation == "randint":
            sizes = [each for each in sizes if isinstance(each, ast.Tuple)]
        dims = self.sizes.many(sizes) if sizes else None
        if operation == "eye" and dims is not None and len(dims) == 1:
            dims = dims * 2
        made = Shape(dims, self._item(arguments)) if dims else None
        # An identity is its content: no pool can hand one out.
        return self._record(call, operation, made, is_factory=operation != "eye")

    def _arange(self, call: ast.Call, arguments: dict[str, ast.expr]) -> Shape | None:
        match call.args:
            case [end]:
                return Shape((self.sizes.dim(end),), self._item(arguments) or 8)
            case [ast.Constant(value=0), end]:
                return Shape((self.sizes.dim(end),), self._item(arguments) or 8)
            case [start, end]:
                return Shape(
                    (f"{self.sizes.dim(end)} - {self.sizes.dim(start)}",), self._item(arguments) or 8
                )
        return None

    def _broadcast(self, node: ast.expr, left: ast.expr, right: ast.expr, item: int | None) -> Shape | None:
        """Outer differences and comparisons of positions; elementwise work on what is large already is not
        listed.
        """
        one, two = self.shape_of(left), self.shape_of(right)
        if one is None or two is None:
            known = one or two
            scalar = right if one is not None else left
            is_plain = isinstance(scalar, ast.Constant) or known is None
            return replace(known, item=item or known.item) if known is not None and is_plain else None
        dims = tensor_ops.broadcast(one.dims, two.dims)
        if dims is None:
            return None
        shape = Shape(dims, item or one.item)
        grows = dims != one.dims and dims != two.dims
        return self._record(node, "outer product of positions", shape) if grows else shape

    def _matmul(self, node: ast.expr, operation: str, left: ast.expr, right: ast.expr) -> Shape | None:
        one, two = self.shape_of(left), self.shape_of(right)
        if one is not None and two is not None:
            return self._record(node, operation, tensor_ops.matmul(one, two))
        keys = tensor_ops.transposed_operand(right)
        if keys is None or tensor_ops.is_parameter(left) or tensor_ops.is_parameter(keys):
            return None
        query, key = dotted_text(left), dotted_text(keys)
        if query is None or key is None or not tensor_ops.names_query_and_key(query, key):
            return None
        self.made.append(Made(node, operation, None, scores=f"{query}.shape[:-1].numel(), {key}.shape[-2]"))
        return None

    def _einsum(self, call: ast.Call) -> Shape | None:
        equation = call.args[0] if call.args else None
        shapes = [self.shape_of(each) for each in call.args[1:]]
        if not isinstance(equation, ast.Constant) or not isinstance(equation.value, str):
            return None
        return self._record(call, "einsum", tensor_ops.einsum(equation.value, shapes))


# By kind, since this runs for every expression of every forward path.
_READ: dict[type[ast.expr], Callable[[TensorReader, Any], Shape | None]] = {
    ast.Name: TensorReader._name,
    ast.Constant: TensorReader._nothing,
    ast.Lambda: TensorReader._nothing,
    ast.Call: TensorReader._call,
    ast.BinOp: TensorReader._arithmetic,
    ast.Compare: TensorReader._compare,
    ast.Attribute: TensorReader._attribute,
    ast.Subscript: TensorReader._subscript,
}
