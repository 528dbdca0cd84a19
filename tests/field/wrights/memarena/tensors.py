from __future__ import annotations

from .arena import Arena, Chunk


class PooledTensor:
    def __init__(self, pool: "TensorPool", chunk: Chunk, numel: int) -> None:
        self.pool = pool
        self.chunk: Chunk | None = chunk
        self.values = [0.0] * numel

    def dispose(self) -> None:
        if self.chunk is not None:
            self.pool.reclaim(self)

    def __enter__(self) -> "PooledTensor":
        return self

    def __exit__(self, *exc) -> None:
        self.dispose()


class TensorPool:
    ITEM = 4

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def empty(self, numel: int) -> PooledTensor | None:
        chunk = self.arena.malloc(numel * self.ITEM)  # clean: the tensor holds it, dispose() frees it
        if chunk is None:
            return None
        return PooledTensor(self, chunk, numel)

    def full(self, numel: int, value: float) -> PooledTensor | None:
        t = self.empty(numel)  # clean: returned
        if t is not None:
            t.values = [value] * numel
        return t

    def reclaim(self, t: PooledTensor) -> None:
        chunk, t.chunk = t.chunk, None
        self.arena.mfree(chunk)

    def resize(self, t: PooledTensor, numel: int) -> bool:
        chunk = self.arena.realloc(t.chunk, numel * self.ITEM)  # clean: near miss, None leaves the tensor's own chunk in place
        if chunk is None:
            return False
        t.chunk = chunk
        t.values += [0.0] * (numel - len(t.values))
        return True

    def like(self, t: PooledTensor, copy: bool = True) -> PooledTensor | None:
        out = self.full(len(t.values), 0.0)  # clean: returned
        if out is not None and copy:
            out.values[:] = t.values
        return out
