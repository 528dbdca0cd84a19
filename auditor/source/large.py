"""When a tensor is large: quadratic in a length, many sizes of the input multiplied, or megabytes by
constants.
"""

from dataclasses import dataclass

from auditor.source.shapes import Shape, Sizes, constant_bytes, is_batch, is_constant, is_sequence, product
from auditor.source.tensor_ops import LIKE
from auditor.source.tensor_reader import Made

LARGE_BYTES = 16 << 20  # the pool's threshold where nothing was measured
_HUGE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Large:
    shape: str
    bytes: str
    reason: str
    weight: int


def verdict(made: Made, sizes: Sizes) -> Large | None:
    """Why this tensor is large, or None where it is small or its shape is not known."""
    if made.scores is not None:
        text = made.scores
        return Large(
            text, f"{_factors(text)}*{made.item or 4}", "quadratic: every query against every key", 3
        )
    if made.shape is None or not made.shape.dims:
        return None
    shape = made.shape
    squared = _quadratic(shape, sizes)
    if squared is not None:
        return _large(shape, f"quadratic in {squared}", 3)
    if made.operation in LIKE and len(shape.dims) == 1 and shape.dims[0].endswith(".numel()"):
        return _large(shape, f"as large as the input {shape.dims[0].removesuffix('.numel()')}", 1)
    symbols = [dim for dim in shape.dims if not is_constant(dim)]
    lengths = [dim for dim in symbols if is_sequence(dim) or (dim in sizes.from_input and not is_batch(dim))]
    if len(symbols) >= 3 and lengths:
        return _large(
            shape,
            f"{len(symbols)} sizes multiplied, {lengths[0]} grows with the input",
            2 if len(symbols) > 3 else 1,
        )
    known = constant_bytes(shape)
    if known >= LARGE_BYTES:
        return _large(shape, f"{known >> 20} MiB by its constants alone", 3 if known >= _HUGE_BYTES else 2)
    return None


def _large(shape: Shape, reason: str, weight: int) -> Large:
    stated = reason if shape.item else f"{reason} (4 bytes an element assumed)"
    return Large(", ".join(shape.dims), product(shape), stated, weight)


def _factors(text: str) -> str:
    return "*".join(part.strip() for part in text.split(","))


def _quadratic(shape: Shape, sizes: Sizes) -> str | None:
    """`n` of (n, n), `q_len and kv_len` of (b, h, q_len, kv_len)."""
    lengths = [dim for dim in shape.dims if is_sequence(dim) and not is_constant(dim)]
    if len(lengths) >= 2:
        first, second = lengths[:2]
        return first if first == second else f"{first} and {second}"
    for index, dim in enumerate(shape.dims):
        if dim in shape.dims[:index] and dim in sizes.from_input and not is_batch(dim):
            return dim
    return None
