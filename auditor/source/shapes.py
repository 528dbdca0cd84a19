"""Shapes by symbol: `b, n, h, d = q.shape` names the sizes of q, and what is made from them has sizes of
its own.
"""

import ast
import re
from dataclasses import dataclass, field, replace

# By the names people give to sizes. What is neither is a symbol of unknown kind, such as `self.head_dim`.
_SEQUENCE = re.compile(
    r"(?:^|_)(?:seq|seqs|seqlen|len|lens|length|lengths|tokens|frames|patches|positions|steps|q_len|kv_len)(?:_|$)"
    r"|^(?:n|l|t|s|m|L|N|T|S|n_q|n_k|lq|lk|tq|tk|sq|sk|nq|nk)$"
)
_BATCH = re.compile(r"^(?:b|bs|bsz|nb|B|n_batch|num_batch|bz)$|batch")

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float16": 2, "half": 2, "bfloat16": 2, "int16": 2,
    "float32": 4, "float": 4, "int32": 4, "int": 4,
    "float64": 8, "double": 8, "int64": 8, "long": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes as source text, and the bytes of one element where the code says them."""

    dims: tuple[str, ...]
    item: int | None = None

    def transposed(self, first: int, second: int) -> "Shape | None":
        dims = list(self.dims)
        if not (-len(dims) <= first < len(dims) and -len(dims) <= second < len(dims)):
            return None
        dims[first], dims[second] = dims[second], dims[first]
        return replace(self, dims=tuple(dims))


def is_constant(dim: str) -> bool:
    return dim.isdigit()


def is_batch(dim: str) -> bool:
    return bool(_BATCH.search(dim))


def is_sequence(dim: str) -> bool:
    """A length that grows with the input: by its own name, or by a name inside an expression of it."""
    return any(_SEQUENCE.search(word) for word in re.findall(r"\w+", dim)) and not is_batch(dim)


def product(shape: Shape) -> str:
    """`b*n*h*d*4`: an expression that gives the bytes once the symbols are known."""
    dims = [
        dim if re.fullmatch(r"[\w.\[\]()-]+", dim) and "-" not in dim else f"({dim})" for dim in shape.dims
    ]
    return "*".join([*dims, str(shape.item or 4)])


def constant_bytes(shape: Shape) -> int:
    total = shape.item or 4
    for dim in shape.dims:
        total *= int(dim) if is_constant(dim) else 1
    return total


@dataclass(slots=True)
class Sizes:
    """What one method's names stand for while it is read from top to bottom."""

    shapes: dict[str, Shape] = field(default_factory=dict)  # tensors
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)  # tuples of sizes: `shape = (b, n)`
    numbers: dict[str, str] = field(default_factory=dict)  # names of constants
    from_input: set[str] = field(default_factory=set)  # symbols read off a tensor's shape

    def dim(self, node: ast.expr) -> str:
        """One size as text; constants folded, `x.shape[0]` by the name that x's sizes were given."""
        match node:
            case ast.Constant(value=int(value)):
                return str(value)
            case ast.Name(id=name):
                return self.numbers.get(name, name)
            case ast.BinOp(left=left, op=op, right=right):
                return _folded(self.dim(left), op, self.dim(right))
            case ast.Call(func=ast.Name(id="int" | "max" | "min"), args=[only]):
                return self.dim(only)
        read = self.read_off(node)
        if read is not None:
            owner, index = read
            shape = self.shapes.get(owner)
            if shape is not None and -len(shape.dims) <= index < len(shape.dims):
                return shape.dims[index]
            text = f"{owner}.shape[{index}]"
            self.from_input.add(text)
            return text
        return ast.unparse(node)

    def read_off(self, node: ast.expr) -> tuple[str, int] | None:
        """(`x`, 1) of `x.size(1)` and `x.shape[1]`."""
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[index]):
                pass
            case ast.Subscript(value=ast.Attribute(value=owner, attr="shape"), slice=index):
                pass
            case _:
                return None
        number = integer(index)
        return (ast.unparse(owner), number) if number is not None else None

    def many(self, nodes: list[ast.expr]) -> tuple[str, ...] | None:
        """The sizes of a call's arguments: `(b, n)`, `b, n`, `*shape`, `shape`, `x.shape`."""
        if len(nodes) == 1:
            only = self.sequence(nodes[0])
            if only is not None:
                return only
        dims: list[str] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                inner = self.sequence(node.value)
                if inner is None:
                    return None
                dims += inner
            else:
                dims.append(self.dim(node))
        return None if any(dim in ("-1", "None") for dim in dims) else tuple(dims)

    def sequence(self, node: ast.expr) -> tuple[str, ...] | None:
        match node:
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return self.many(elements) if len(elements) != 1 else self._single(elements[0])
            case ast.Name(id=name):
                return self.lists.get(name)
            case (
                ast.Attribute(value=owner, attr="shape")
                | ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[])
            ):
                shape = self.shapes.get(ast.unparse(owner))
                return shape.dims if shape else None
            case ast.Subscript(value=value, slice=ast.Slice(lower=low, upper=high, step=None)):
                inner, cut = self.sequence(value), _slice(low, high)
                return inner[cut] if inner is not None and cut is not None else None
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                one, two = self.sequence(left), self.sequence(right)
                return one + two if one is not None and two is not None else None
        return None

    def _single(self, element: ast.expr) -> tuple[str, ...] | None:
        if isinstance(element, ast.Starred):
            return self.sequence(element.value)
        dim = self.dim(element)
        return None if dim == "-1" else (dim,)


def shape_owner(value: ast.expr) -> tuple[str | None, bool]:
    """`q` of `q.shape` and `q.size()`, and whether all of it; `q.shape[:2]` is a part."""
    match value:
        case (
            ast.Attribute(value=owner, attr="shape")
            | ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[])
        ):
            return ast.unparse(owner), True
        case ast.Subscript(value=inner, slice=ast.Slice()):
            return shape_owner(inner)[0], False
    return None, False


def integer(node: ast.expr | None) -> int | None:
    """The value of `3` and `-1`."""
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
    return None


def _slice(low: ast.expr | None, high: ast.expr | None) -> slice | None:
    first, last = integer(low), integer(high)
    if (low is not None and first is None) or (high is not None and last is None):
        return None
    return slice(first, last)


def _folded(left: str, op: ast.operator, right: str) -> str:
    """`4 * 4096` is 16384; what has a symbol stays text in parentheses where it must."""
    signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}
    sign = signs.get(type(op))
    if sign is None:
        return f"({left} {ast.unparse(ast.BinOp(ast.Name('_'), op, ast.Name('_'))).split()[1]} {right})"
    if is_constant(left) and is_constant(right) and not (sign == "//" and int(right) == 0):
        one, two = int(left), int(right)
        value = {"+": one + two, "-": one - two, "*": one * two}.get(sign)
        return str(one // two if value is None else value)
    return f"{left} {sign} {right}" if sign in "+-" else f"{_grouped(left)}{sign}{_grouped(right)}"


def _grouped(text: str) -> str:
    return f"({text})" if " " in text else text
