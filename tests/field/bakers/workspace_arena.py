"""Recompute workspace for activation checkpointing, with several layers of wrappers."""
from __future__ import annotations

from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple


class Chunk:
    __slots__ = ("size", "mem", "owner")

    def __init__(self, size: int) -> None:
        self.size = size
        self.mem = bytearray(size)
        self.owner: Optional[str] = None


class Arena:
    """Size-classed chunks; `obtain` rounds up to a power of two."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._bins: Dict[int, List[Chunk]] = {}

    @staticmethod
    def _class(nbytes: int) -> int:
        return 1 << max(6, (nbytes - 1).bit_length())

    def obtain(self, nbytes: int, owner: str) -> Chunk:
        size = self._class(nbytes)
        free = self._bins.setdefault(size, [])
        if not free:
            if size > self.budget:
                raise MemoryError(size)
            self.budget -= size
            free.append(Chunk(size))
        chunk = free.pop()
        chunk.owner = owner
        return chunk

    def recycle(self, chunk: Chunk) -> None:
        chunk.owner = None
        self._bins[chunk.size].append(chunk)


class TypedArena:
    """Element-count interface on top of the byte arena."""

    WIDTH = {"float32": 4, "bfloat16": 2, "uint8": 1}

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def obtain_elems(self, n: int, dtype: str, owner: str) -> Chunk:
        return self.arena.obtain(n * self.WIDTH[dtype], owner)  # clean: returned

    def recycle(self, chunk: Chunk) -> None:
        self.arena.recycle(chunk)


class LayerWorkspace:
    """What a layer asks for during recompute."""

    def __init__(self, typed: TypedArena, layer: str) -> None:
        self.typed = typed
        self.layer = layer
        self._extra: List[Chunk] = []
        self._mask: Optional[Chunk] = None

    def scores(self, heads: int, seq: int) -> Chunk:
        return self.typed.obtain_elems(heads * seq * seq, "bfloat16", self.layer)  # clean: returned through the second wrapper

    def mask(self, seq: int) -> Chunk:
        if self._mask is None:
            self._mask = self.typed.obtain_elems(seq * seq, "uint8", self.layer)  # clean: kept until reset
        return self._mask

    def extra(self, n: int) -> Chunk:
        chunk = self.typed.obtain_elems(n, "float32", self.layer)  # clean: near miss, also returned, but the list owns it and reset recycles
        self._extra.append(chunk)
        return chunk

    def done(self, chunk: Chunk) -> None:
        self.typed.recycle(chunk)

    def reset(self) -> None:
        for chunk in self._extra:
            self.typed.recycle(chunk)
        self._extra.clear()
        if self._mask is not None:
            self.typed.recycle(self._mask)
            self._mask = None


class CheckpointedAttention:
    def __init__(self, ws: LayerWorkspace, heads: int) -> None:
        self.ws = ws
        self.heads = heads

    def recompute(self, seq: int, kernel: Callable[[bytearray], int]) -> int:
        scores = self.ws.scores(self.heads, seq)  # clean: done in finally
        try:
            return kernel(scores.mem)
        finally:
            self.ws.done(scores)

    def recompute_wide(self, seq: int, kernel: Callable[[bytearray], int]) -> int:
        scores = self.ws.scores(self.heads, seq)  # leak: rebound to the wider chunk
        if scores.size < 4 * seq * seq:
            scores = self.ws.scores(self.heads * 2, seq)  # clean: done at the end
        value = kernel(scores.mem)
        self.ws.done(scores)
        return value

    def recompute_grown(self, seq: int, kernel: Callable[[bytearray], int]) -> int:
        scores = self.ws.scores(self.heads, seq)  # clean: near miss, done before the wider one takes the name
        if scores.size < 4 * seq * seq:
            self.ws.done(scores)
            scores = self.ws.scores(self.heads * 2, seq)  # clean: done at the end
        value = kernel(scores.mem)
        self.ws.done(scores)
        return value

    def entropy(self, seq: int) -> float:
        return float(sum(self.ws.scores(self.heads, seq).mem[:seq]))  # leak: read in passing, never done

    def masked(self, seq: int, kernel: Callable[[bytearray, bytearray], int]) -> int:
        mask = self.ws.mask(seq)  # clean: near miss, the workspace keeps it and resets it
        scores = self.ws.scores(self.heads, seq)  # clean: done below
        value = kernel(scores.mem, mask.mem)
        self.ws.done(scores)
        return value

    def finish_layer(self) -> None:
        self.ws.reset()

    def dropout(self, seq: int) -> int:
        rng = self.ws.extra(seq)  # clean: near miss, reset recycles the list
        return rng.size

    def tiles(self, seq: int, tile: int) -> Iterator[Chunk]:
        """Hands each tile's chunk to the consumer, who calls done."""
        for _ in range(0, seq, tile):
            yield self.ws.scores(self.heads, tile)  # clean: yielded, the consumer calls done

    def sum_tiles(self, seq: int, tile: int) -> int:
        total = 0
        for chunk in self.tiles(seq, tile):  # clean: each chunk is done
            total += chunk.size
            self.ws.done(chunk)
        return total

    def max_tile(self, seq: int, tile: int) -> int:
        best = 0
        for chunk in self.tiles(seq, tile):  # leak: chunks that do not beat the best are skipped with continue
            if chunk.size <= best:
                continue
            best = chunk.size
            self.ws.done(chunk)
        return best


class MaybeOwned:
    """Out-buffer given by the caller or taken here."""

    def __init__(self, typed: TypedArena) -> None:
        self.typed = typed

    def project(self, n: int, out: Optional[Chunk] = None) -> int:
        owned = out is None
        if owned:
            out = self.typed.obtain_elems(n, "float32", "project")  # clean: near miss, recycled under the flag
        size = self._fill(out, n)
        if owned:
            self.typed.recycle(out)
        return size

    def project_checked(self, n: int, out: Optional[Chunk] = None) -> int:
        owned = False
        if out is None:
            out = self.typed.obtain_elems(n, "float32", "project")  # leak: the flag is never set, so nothing is recycled
        size = self._fill(out, n)
        if owned:
            self.typed.recycle(out)
        return size

    def project_into(self, n: int, out: Optional[Chunk] = None) -> Tuple[Chunk, bool]:
        """The result and whether the caller has to recycle it."""
        if out is not None:
            self._fill(out, n)
            return out, False
        fresh = self.typed.obtain_elems(n, "float32", "project")  # clean: returned with the flag
        self._fill(fresh, n)
        return fresh, True

    def chain(self, sizes: Sequence[int]) -> int:
        total = 0
        for n in sizes:
            chunk, mine = self.project_into(n)  # clean: recycled under the returned flag
            total += chunk.size
            if mine:
                self.typed.recycle(chunk)
        return total

    def chain_last(self, sizes: Sequence[int]) -> int:
        chunk: Optional[Chunk] = None
        mine = False
        for n in sizes:
            chunk, mine = self.project_into(n)  # leak: only the last of the loop's chunks is recycled
        if chunk is None:
            return 0
        size = chunk.size
        if mine:
            self.typed.recycle(chunk)
        return size

    def _fill(self, chunk: Chunk, n: int) -> int:
        upto = min(n, chunk.size)
        chunk.mem[:upto] = b"\1" * upto
        return upto
