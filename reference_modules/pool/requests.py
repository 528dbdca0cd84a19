"""What a caller may ask a pool for: shape, dtype and device, checked, with errors that name the value and the
way out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from reference_modules.pool.errors import PoolValueError

MOST_BYTES = 1 << 47
"""The address space of a process: a request beyond it is a mistake in a shape, not a lack of memory."""

Shape = int | Sequence[int]


def checked_shape(shape: Shape, pool: str) -> tuple[int, ...]:
    """The shape as a tuple of sizes; an int is one dimension, as for torch.empty."""
    try:
        sizes = torch.Size((shape,) if isinstance(shape, int) else shape)
    except TypeError as error:
        raise PoolValueError(f"pool {pool!r}: shape {shape!r} is not a sequence of integers") from error
    if sizes and min(sizes) < 0:
        raise PoolValueError(
            f"pool {pool!r}: shape {shape!r} has a negative size; every size must be 0 or more"
        )
    return sizes


def checked_bytes(sizes: tuple[int, ...], dtype: torch.dtype, pool: str) -> int:
    """Bytes of a tensor of this shape and type."""
    if not isinstance(dtype, torch.dtype):
        raise PoolValueError(
            f"pool {pool!r}: {dtype!r} is no torch.dtype; give one, for example torch.float32"
        )
    nbytes = math.prod(sizes) * dtype.itemsize
    if nbytes > MOST_BYTES:
        raise PoolValueError(
            f"pool {pool!r}: shape {tuple(sizes)} of {dtype} asks for {nbytes} bytes, more than a process "
            "can address "
            f"({MOST_BYTES}); look at the shape"
        )
    return nbytes


def checked_device(device: str | int | torch.device | None, home: torch.device, pool: str) -> None:
    """Refuse a device the pool does not live on; None is its own."""
    if device is None:
        return
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise PoolValueError(f"pool {pool!r} lives on {home}; {device!r} is no device: {error}") from error
    same_index = home.type == "cpu" or asked.index in (None, home.index)
    if asked.type != home.type or not same_index:
        raise PoolValueError(
            f"pool {pool!r} lives on {home} and cannot serve {asked}; use "
            f"get_global_memory_pool({str(asked)!r}) or a pool made for it"
        )
