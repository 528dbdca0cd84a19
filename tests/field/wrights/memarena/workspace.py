from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from .tensors import PooledTensor, TensorPool


class Workspace:
    """Temporaries of one attention call, by name."""

    def __init__(self, pool: TensorPool) -> None:
        self.pool = pool
        self.named: dict[str, PooledTensor] = {}

    def tensor(self, name: str, numel: int) -> PooledTensor | None:
        t = self.named.get(name)
        if t is not None and len(t.values) >= numel:
            return t
        if t is not None:
            self.named.pop(name).dispose()
        t = self.pool.empty(numel)  # clean: near miss, the smaller one of that name was disposed
        if t is not None:
            self.named[name] = t
        return t

    def rename(self, old: str, new: str) -> None:
        if new != old and new in self.named:
            self.named.pop(new).dispose()
        self.named[new] = self.named.pop(old)

    def reset(self) -> None:
        for t in self.named.values():
            t.dispose()
        self.named.clear()

    @contextmanager
    def temporary(self, numel: int) -> Iterator[PooledTensor | None]:
        t = self.pool.full(numel, 0.0)  # clean: disposed in the finally
        try:
            yield t
        finally:
            if t is not None:
                t.dispose()

    def softmax(self, scores: list[float]) -> list[float]:
        with self.temporary(len(scores)) as t:  # clean: scoped by the with
            if t is None:
                return list(scores)
            t.values[:] = [2.718281828 ** s for s in scores]
            total = sum(t.values)
            return [v / total for v in t.values]

    def scaled(self, src: PooledTensor, factor: float) -> list[float]:
        t = self.pool.like(src)  # leak: a list comes back, the tensor behind it is not disposed
        if t is None:
            return []
        for i, v in enumerate(t.values):
            t.values[i] = v * factor
        return list(t.values)

    def add(self, a: PooledTensor, b: PooledTensor) -> PooledTensor | None:
        out = self.pool.like(a)  # clean: near miss, disposed on a mismatch, returned otherwise
        if out is None or len(a.values) == len(b.values):
            if out is not None:
                out.values[:] = [x + y for x, y in zip(a.values, b.values)]
            return out
        out.dispose()
        return None

    def chain(self, tensors: list[PooledTensor]) -> list[float]:
        acc = self.pool.like(tensors[0])  # leak: the first sum takes its name without a dispose
        for t in tensors[1:]:
            if acc is None:
                return []
            acc = self.add(acc, t)  # leak: the next sum takes its name
        if acc is None:
            return []
        result = list(acc.values)
        acc.dispose()
        return result

    def chain_checked(self, tensors: list[PooledTensor]) -> list[float]:
        acc = self.pool.like(tensors[0])  # clean: near miss, disposed after each sum
        for t in tensors[1:]:
            if acc is None:
                return []
            nxt = self.add(acc, t)  # clean: becomes acc, which is disposed
            acc.dispose()
            acc = nxt
        if acc is None:
            return []
        with acc:
            return list(acc.values)
