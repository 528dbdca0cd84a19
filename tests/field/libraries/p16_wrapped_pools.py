"""Layered buffer pools: a raw pool, a rounding wrapper, a metering wrapper and their users."""
from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from typing import Callable, Dict, Iterator, List, Optional, Protocol, Sequence, Tuple

import torch
from torch import Tensor, nn


class RawPool:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bins: Dict[int, List[Tensor]] = defaultdict(list)
        self._mutex = threading.Lock()

    def grab(self, nbytes: int) -> Tensor:
        with self._mutex:
            if self._bins[nbytes]:
                return self._bins[nbytes].pop()  # clean: handed to the caller
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def drop(self, raw: Tensor) -> None:
        with self._mutex:
            self._bins[raw.numel()].append(raw)


class RoundingPool:
    """Rounds sizes up to a power of two so that bins are shared."""

    def __init__(self, inner: RawPool, smallest: int = 512) -> None:
        self.inner = inner
        self.smallest = smallest

    def grab(self, nbytes: int) -> Tensor:
        size = self.smallest
        while size < nbytes:
            size *= 2
        return self.inner.grab(size)  # clean: handed to the caller unchanged

    def drop(self, raw: Tensor) -> None:
        self.inner.drop(raw)


class MeteredPool:
    """Counts what is out and enforces a soft limit."""

    def __init__(self, inner: RoundingPool, limit: int) -> None:
        self.inner = inner
        self.limit = limit
        self.out = 0
        self.rejected = 0

    def grab(self, nbytes: int) -> Optional[Tensor]:
        raw = self.inner.grab(nbytes)  # clean: near miss, dropped in the rejected branch and otherwise returned
        if self.out + raw.numel() > self.limit:
            self.rejected += 1
            self.inner.drop(raw)
            return None
        self.out += raw.numel()
        return raw

    def grab_exact(self, nbytes: int) -> Optional[Tensor]:
        raw = self.inner.grab(nbytes)  # leak: a size that was rounded up is counted as rejected and never dropped
        if raw.numel() != nbytes:
            self.rejected += 1
            return None
        self.out += nbytes
        return raw

    def drop(self, raw: Tensor) -> None:
        self.out -= raw.numel()
        self.inner.drop(raw)


class TypedLease:
    """Owns raw storage and exposes it as a typed tensor; close() is idempotent."""

    def __init__(self, pool: MeteredPool, raw: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._pool = pool
        self._raw: Optional[Tensor] = raw
        count = 1
        for s in shape:
            count *= s
        self.tensor = raw[: count * dtype.itemsize].view(dtype).view(*shape)

    def close(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            self._pool.drop(raw)

    def __enter__(self) -> Tensor:
        return self.tensor

    def __exit__(self, *exc) -> None:
        self.close()


class TensorProvider:
    def __init__(self, pool: MeteredPool) -> None:
        self.pool = pool
        self._named: Dict[str, TypedLease] = {}

    def rent(self, shape: Sequence[int], dtype: torch.dtype) -> Optional[TypedLease]:
        nbytes = int(torch.tensor(list(shape)).prod()) * dtype.itemsize
        raw = self.pool.grab(nbytes)  # clean: wrapped in the lease that is returned
        if raw is None:
            return None
        return TypedLease(self.pool, raw, shape, dtype)

    def hand_back(self, lease: TypedLease) -> None:
        lease.close()

    def named(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Optional[Tensor]:
        lease = self._named.get(name)
        if lease is None or tuple(lease.tensor.shape) != tuple(shape):
            lease = self.rent(shape, dtype)  # leak: a lease of another shape under the same name is overwritten while still open
            if lease is None:
                return None
            self._named[name] = lease
        return lease.tensor

    def close(self) -> None:
        for lease in self._named.values():
            lease.close()
        self._named.clear()


class FusedMLP(nn.Module):
    def __init__(self, dim: int, hidden: int, provider: Optional[TensorProvider] = None) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.provider = provider

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        lease = None
        if self.provider is not None:
            lease = self.provider.rent((x.shape[0], self.w1.out_features), x.dtype)  # clean: near miss, the None test below correlates with the provider
        hidden = lease.tensor if lease is not None else x.new_empty(x.shape[0], self.w1.out_features)
        torch.matmul(x, self.w1.weight.t(), out=hidden)
        hidden.relu_()
        y = hidden @ self.w2.weight.t()
        if lease is not None:
            self.provider.hand_back(lease)
        return y

    @torch.no_grad()
    def forward_topk(self, x: Tensor, k: int) -> Tensor:
        lease = self.provider.rent((x.shape[0], self.w1.out_features), x.dtype)  # leak: handed back in training mode only
        if lease is None:
            return self.forward(x)
        torch.matmul(x, self.w1.weight.t(), out=lease.tensor)
        values, idx = lease.tensor.topk(k, dim=-1)
        sparse = torch.zeros_like(lease.tensor).scatter_(-1, idx, values)
        if self.training:
            self.provider.hand_back(lease)
        return sparse @ self.w2.weight.t()

    @torch.no_grad()
    def hidden_copy(self, x: Tensor) -> Optional[Tensor]:
        lease = self.provider.rent((x.shape[0], self.w1.out_features), x.dtype)  # clean: near miss, the with block closes the lease and the clone leaves it
        if lease is None:
            return None
        with lease as hidden:
            torch.matmul(x, self.w1.weight.t(), out=hidden)
            return hidden.clone()

    @torch.no_grad()
    def hidden_norm(self, x: Tensor) -> float:
        raw = self.provider.pool.grab(x.shape[0] * self.w1.out_features * x.dtype.itemsize)  # leak: the norm is returned without drop
        if raw is None:
            return float((x @ self.w1.weight.t()).norm())
        hidden = raw[: x.shape[0] * self.w1.out_features * x.dtype.itemsize].view(x.dtype).view(x.shape[0], -1)
        torch.matmul(x, self.w1.weight.t(), out=hidden)
        return float(hidden.norm())


@contextlib.contextmanager
def rented_pair(provider: TensorProvider, shape: Sequence[int], dtype: torch.dtype) -> Iterator[Optional[Tuple[Tensor, Tensor]]]:
    stack = contextlib.ExitStack()
    with stack:
        pair: List[Tensor] = []
        for _ in range(2):
            lease = provider.rent(shape, dtype)  # clean: near miss, entered on the exit stack, which closes it on every way out
            if lease is not None:
                pair.append(stack.enter_context(lease))
        yield (pair[0], pair[1]) if len(pair) == 2 else None


def double_precision_dot(provider: TensorProvider, a: Tensor, b: Tensor) -> float:
    with rented_pair(provider, a.shape, torch.float64) as pair:  # clean: the with block closes both
        if pair is None:
            return float(a.double().flatten() @ b.double().flatten())
        return float(pair[0].copy_(a).flatten() @ pair[1].copy_(b).flatten())
