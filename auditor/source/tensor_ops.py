"""What torch's operations do to shapes, and which of them make a new tensor: a table, and the arithmetic
behind it.
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import replace

from auditor.source.shapes import Shape, Sizes, integer

ACTIVATION = re.compile(
    r"^(?:q|k|v|x|query|key|value|queries|keys|values|inputs?|hidden|\w+_states|\w+_layer)$"
)
FACTORIES = frozenset(
    f"torch.{name}" for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint", "eye")
)
NEW = frozenset(("new_zeros", "new_ones", "new_empty", "new_full"))
LIKE = frozenset(("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"))
MAKES = frozenset(
    (
        "cat",
        "concat",
        "stack",
        "softmax",
        "tril",
        "triu",
        "one_hot",
        "repeat",
        "contiguous",
        "clone",
        "pad",
        "gather",
        "cdist",
    )
)
_SAME = frozenset(
    (
        "softmax",
        "tril",
        "triu",
        "clone",
        "masked_fill",
        "dropout",
        "relu",
        "exp",
        "sigmoid",
        "to",
        "type_as",
        "detach",
    )
)
_DTYPES = {"float": 4, "half": 2, "bfloat16": 2, "bool": 1, "long": 8, "int": 4, "double": 8}
_IN_PLACE = ("fill_", "zero_", "copy_", "masked_fill_", "tril_", "triu_", "add_", "mul_", "div_", "sub_")


def result(
    operation: str,
    shapes: list[Shape | None],
    operands: list[ast.expr],
    arguments: dict[str, ast.expr],
    sizes: Sizes,
) -> Shape | None:
    """The shape of `operation` on operands, the receiver first; None where it is not known."""
    if operation in ("cat", "concat", "stack"):
        return _joined(operation, operands, arguments, sizes)
    if operation == "gather":
        return shapes[-1] if len(shapes) == 3 else None
    first = shapes[0]
    if first is None:
        return _reshaped_unknown(operation, operands, sizes)
    if operation in _SAME or operation in _IN_PLACE:
        return first
    if operation in _DTYPES:
        return replace(first, item=_DTYPES[operation])
    return _rearranged(operation, first, operands[1:], arguments, sizes)


def _reshaped_unknown(operation: str, operands: list[ast.expr], sizes: Sizes) -> Shape | None:
    """`self.q_proj(x).view(b, n, h, d)`: the new shape is written down whatever the old one was."""
    if operation in ("view", "reshape", "expand") and len(operands) > 1:
        dims = sizes.many(operands[1:])
        return Shape(dims) if dims else None
    return None


def _rearranged(
    operation: str, first: Shape, rest: list[ast.expr], arguments: dict[str, ast.expr], sizes: Sizes
) -> Shape | None:
    numbers = [integer(each) for each in rest]
    match operation, numbers:
        case (("view" | "reshape"), _):
            dims = sizes.many(rest) if rest else None
            return replace(first, dims=dims) if dims else None
        case (("transpose" | "swapaxes"), [int(one), int(two)]):
            return first.transposed(one, two)
        case "unsqueeze", [int(at)]:
            return _unsqueezed(first, at)
        case "permute", [*order] if len(order) == len(first.dims):
            picked = [
                first.dims[each] for each in order if each is not None and -len(order) <= each < len(order)
            ]
            return replace(first, dims=tuple(picked)) if len(picked) == len(order) else None
        case "expand", _:
            return _expanded(first, rest, sizes)
        case "repeat", _:
            return _repeated(first, rest, sizes)
        case "one_hot", _:
            count = rest[0] if rest else arguments.get("num_classes")
            return Shape((*first.dims, sizes.dim(count)), 8) if count is not None else None
    return None


def _unsqueezed(shape: Shape, at: int) -> Shape:
    place = at if at >= 0 else len(shape.dims) + 1 + at
    return replace(shape, dims=(*shape.dims[:place], "1", *shape.dims[place:]))


def _expanded(shape: Shape, rest: list[ast.expr], sizes: Sizes) -> Shape | None:
    wanted = [sizes.dim(each) for each in rest if not isinstance(each, ast.Starred | ast.Tuple)]
    if len(wanted) != len(rest) or len(wanted) < len(shape.dims):
        return None
    known = ("1",) * (len(wanted) - len(shape.dims)) + shape.dims
    return replace(
        shape, dims=tuple(old if new == "-1" else new for old, new in zip(known, wanted, strict=True))
    )


def _repeated(shape: Shape, rest: list[ast.expr], sizes: Sizes) -> Shape | None:
    times = sizes.many(rest)
    if times is None or len(times) < len(shape.dims):
        return None
    known = ("1",) * (len(times) - len(shape.dims)) + shape.dims
    return replace(shape, dims=tuple(_times(one, two) for one, two in zip(known, times, strict=True)))


def _times(one: str, two: str) -> str:
    if "1" in (one, two):
        return two if one == "1" else one
    return f"{one}*{two}"


def _joined(
    operation: str, operands: list[ast.expr], arguments: dict[str, ast.expr], sizes: Sizes
) -> Shape | None:
    """`cat` adds the sizes along its dimension, `stack` puts a new one; only where every part is a known
    name.
    """
    parts = operands[0]
    if not isinstance(parts, ast.Tuple | ast.List):
        return None
    shapes = [sizes.shapes.get(ast.unparse(each)) for each in parts.elts]
    known = [shape for shape in shapes if shape is not None]
    if not known or len(known) != len(shapes) or len({len(shape.dims) for shape in known}) > 1:
        return None
    at = integer(operands[1] if len(operands) > 1 else arguments.get("dim"))
    at = 0 if at is None else at
    dims = list(known[0].dims)
    if operation == "stack":
        return _unsqueezed(known[0], at) if len(known) == 1 else _stacked(known[0], at, len(known))
    if not -len(dims) <= at < len(dims):
        return None
    dims[at] = _sum([shape.dims[at] for shape in known])
    return replace(known[0], dims=tuple(dims))


def _stacked(shape: Shape, at: int, count: int) -> Shape:
    place = at if at >= 0 else len(shape.dims) + 1 + at
    return replace(shape, dims=(*shape.dims[:place], str(count), *shape.dims[place:]))


def _sum(dims: Sequence[str]) -> str:
    if all(dim.isdigit() for dim in dims):
        return str(sum(map(int, dims)))
    if len(set(dims)) == 1:
        return f"{len(dims)}*{dims[0]}"
    return " + ".join(dims)


def broadcast(one: tuple[str, ...], two: tuple[str, ...]) -> tuple[str, ...] | None:
    """Sizes of an elementwise operation; None where two symbols meet of which neither is known to be 1."""
    rank = max(len(one), len(two))
    left = ("1",) * (rank - len(one)) + one
    right = ("1",) * (rank - len(two)) + two
    dims = []
    for first, second in zip(left, right, strict=True):
        if first != second and "1" not in (first, second):
            return None
        dims.append(second if first == "1" else first)
    return tuple(dims)


def matmul(one: Shape, two: Shape) -> Shape | None:
    if len(one.dims) < 2 or len(two.dims) < 2:
        return None
    head = broadcast(one.dims[:-2], two.dims[:-2])
    return replace(one, dims=(*head, one.dims[-2], two.dims[-1])) if head is not None else None


def einsum(equation: str, shapes: list[Shape | None]) -> Shape | None:
    """Letters are sizes by the operands that are known; the output's must all be."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or "." in equation or len(terms) != len(shapes):
        return None
    sizes: dict[str, str] = {}
    for term, shape in zip(terms, shapes, strict=True):
        if shape is not None and len(shape.dims) == len(term):
            sizes |= dict(zip(term, shape.dims, strict=True))
    if any(letter not in sizes for letter in output):
        return _by_letters(terms, output)
    item = next((shape.item for shape in shapes if shape is not None), None)
    return Shape(tuple(sizes[letter] for letter in output), item)


# Letters by which equations name positions in a sequence; b, h, d, e, c name anything else.
_POSITIONS = frozenset(("ij", "qk", "nm", "ts", "ls", "mn", "st", "lm", "nl"))


def _by_letters(terms: list[str], output: str) -> Shape | None:
    """`bhid,bhjd->bhij` is a score matrix by its letters: two positions out, one from each operand,
    batched.
    """
    if len(terms) != 2 or len(output) < 3 or output[-2:] not in _POSITIONS:
        return None
    first, second = terms
    query, key = output[-2], output[-1]
    shared = set(first) & set(second)
    is_scores = query in first and key in second and query not in second and key not in first
    if not is_scores or not shared & set(output) or not shared - set(output):
        return None
    return Shape(tuple(_LETTERS.get(letter, letter) for letter in output))


_LETTERS = {"i": "n_q", "j": "n_k", "q": "n_q", "k": "n_k"}


def indexed(shape: Shape | None, index: ast.expr) -> Shape | None:
    """`x[:, None]` and `x[None]` add a size of 1, `:` keeps one, an integer drops one; anything else is
    unknown.
    """
    if shape is None:
        return None
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    dims: list[str] = []
    left = list(shape.dims)
    for part in parts:
        match part:
            case ast.Constant(value=None):
                dims.append("1")
            case ast.Slice(lower=None, upper=None, step=None) if left:
                dims.append(left.pop(0))
            case _ if integer(part) is not None and left:
                left.pop(0)
            case _:
                return None
    return replace(shape, dims=(*dims, *left))


def transposed_operand(node: ast.expr) -> ast.expr | None:
    """`k` of `k.transpose(-1, -2)`, `k.transpose(2, 3)`, `k.mT`."""
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="transpose"), args=[one, two]):
            pair = {integer(one), integer(two)}
            return value if pair in ({-1, -2}, {2, 3}, {1, 2}) else None
        case ast.Attribute(value=value, attr="mT"):
            return value
    return None


def is_parameter(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.startswith("self.") or "weight" in text


_QUERY = re.compile(r"(?:^|[._])(?:q|qs|query|queries|query_\w+|q_\w+|\w+_q)(?:$|_)")
_KEY = re.compile(r"(?:^|[._])(?:k|ks|key|keys|key_\w+|k_\w+|\w+_k)(?:$|_)")


def names_query_and_key(query: str, key: str) -> bool:
    """Only operands called query and key make scores; `x @ y.transpose(1, 2)` may be anything."""
    return bool(_QUERY.search(query) and _KEY.search(key))
