"""`with pool.lease(...)`: a class, because a generator would cost more than the release itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from reference_modules.pool.requests import Shape
    from reference_modules.pool.tensor_pool import Device, TensorPool


class LeaseContext(AbstractContextManager[torch.Tensor]):
    """A tensor from the pool for the length of a `with` block; used once."""

    __slots__ = ("_asked", "_pool", "_tensor", "_zero")

    def __init__(
        self, pool: TensorPool, shape: Shape, dtype: torch.dtype, device: Device | None, zero: bool
    ) -> None:
        self._pool = pool
        self._asked = shape, dtype, device
        self._zero = zero

    def __enter__(self) -> torch.Tensor:
        self._tensor = self._pool.allocate(*self._asked, zero=self._zero)
        return self._tensor

    def __exit__(self, *_: object) -> None:
        self._pool.deallocate(self._tensor)
        del self._tensor
