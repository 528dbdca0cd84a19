"""Shape-keyed reuse of device tensors, so that the ring never hits the caching allocator."""
from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import Any, Iterator

try:
    import torch
except ImportError:
    torch = None


class HostTensor:
    """Stand-in for hosts without torch."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    def clone(self) -> "HostTensor":
        return HostTensor(self.shape, self.dtype)

    def zero_(self) -> "HostTensor":
        return self


class TensorPool:
    def __init__(self, device: str = "cuda", max_live: int = 256) -> None:
        self.device = device
        self.max_live = max_live
        self._free: dict[tuple, list[Any]] = defaultdict(list)
        self._live = 0

    def checkout(self, shape: tuple[int, ...], dtype: Any) -> Any:
        key = (tuple(shape), dtype)
        if self._live >= self.max_live:
            raise MemoryError(f"tensor pool exhausted ({self._live} live)")
        self._live += 1
        if self._free[key]:
            return self._free[key].pop()
        if torch is None or isinstance(dtype, str):
            return HostTensor(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def checkin(self, t: Any) -> None:
        self._live -= 1
        self._free[(tuple(t.shape), t.dtype)].append(t)

    def checkout_like(self, t: Any) -> Any:
        return self.checkout(t.shape, t.dtype)  # clean: handed to the caller

    def checkout_zeroed(self, shape: tuple[int, ...], dtype: Any) -> Any:
        t = self.checkout(shape, dtype)  # clean: returned
        t.zero_()
        return t

    @contextmanager
    def scoped(self, shape: tuple[int, ...], dtype: Any) -> Iterator[Any]:
        t = self.checkout(shape, dtype)  # clean: given back in finally
        try:
            yield t
        finally:
            self.checkin(t)

    @property
    def live(self) -> int:
        return self._live
