"""Workspace arena for layers and captured graphs: first fit over spans of one big allocation."""
from __future__ import annotations

import bisect
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterator

import torch

ALIGN = 256
MIN_SPAN = 4096


class ArenaFull(MemoryError):
    pass


class CaptureError(RuntimeError):
    pass


@dataclass(frozen=True, slots=True)
class Region:
    offset: int
    size: int


def _round(n: int) -> int:
    return (n + ALIGN - 1) // ALIGN * ALIGN


class Arena:
    def __init__(self, nbytes: int, device: str = "cuda") -> None:
        self.base = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._spans: list[tuple[int, int]] = [(0, nbytes)]
        self.peak = 0

    def alloc(self, nbytes: int) -> Region:
        want = _round(nbytes)
        for i, (_, size) in enumerate(self._spans):
            if size >= want:
                break
        else:
            raise ArenaFull(f"{want} bytes in {len(self._spans)} spans")
        offset, size = self._spans.pop(i)  # leak: a rest below MIN_SPAN is neither in the region nor in the list
        rest = size - want
        if rest >= MIN_SPAN:
            self._spans.insert(i, (offset + want, rest))
        self.peak = max(self.peak, offset + want)
        return Region(offset, want)

    def alloc_top(self, nbytes: int) -> Region:
        """From the end of the last span, for long-lived regions."""
        want = _round(nbytes)
        if not self._spans or self._spans[-1][1] < want:
            raise ArenaFull(f"{want} bytes at the top")
        offset, size = self._spans.pop()  # clean: near miss, the lower part goes back to the list and the upper to the caller
        if size > want:
            self._spans.append((offset, size - want))
        return Region(offset + size - want, want)

    def free(self, region: Region) -> None:
        i = bisect.bisect(self._spans, (region.offset, region.size))
        offset, size = region.offset, region.size
        if i < len(self._spans) and self._spans[i][0] == offset + size:
            size += self._spans[i][1]
            del self._spans[i]
        if i and sum(self._spans[i - 1]) == offset:
            i -= 1
            offset, size = self._spans[i][0], size + self._spans[i][1]
            del self._spans[i]
        self._spans.insert(i, (offset, size))

    def view(self, region: Region, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.base[region.offset:region.offset + count].view(dtype).view(shape)

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[Region]:
        region = self.alloc(nbytes)  # clean: freed by the finally
        try:
            yield region
        finally:
            self.free(region)


def attention(arena: Arena, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention with workspace; the eager one when the arena is too full."""
    try:
        scores = arena.alloc(q.shape[0] * k.shape[0] * 4)  # leak: ArenaFull from the second alloc falls to the eager path with this held
        out = arena.alloc(q.nbytes)  # clean: freed below
    except ArenaFull:
        return torch.softmax(q @ k.T, dim=-1) @ v
    s = arena.view(scores, (q.shape[0], k.shape[0]), torch.float32)
    o = arena.view(out, tuple(q.shape), q.dtype)
    torch.matmul(q, k.T, out=s)
    torch.matmul(s.softmax(-1).to(q.dtype), v, out=o)
    result = o.clone()
    arena.free(out)
    arena.free(scores)
    return result


def mlp(arena: Arena, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    with arena.scratch(x.shape[0] * up.shape[1] * x.element_size()) as region:  # clean: the context manager frees
        h = arena.view(region, (x.shape[0], up.shape[1]), x.dtype)
        torch.matmul(x, up, out=h)
        return torch.nn.functional.silu(h) @ down


def dispatch(arena: Arena, x: torch.Tensor, experts: torch.Tensor, n_experts: int,
             run: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    out = torch.zeros_like(x)
    counts = torch.bincount(experts, minlength=n_experts).tolist()
    for e in range(n_experts):
        region = arena.alloc(max(1, counts[e]) * x[0].nbytes)  # leak: an expert without tokens goes on with its region held
        if counts[e] == 0:
            continue
        rows = (experts == e).nonzero().flatten()
        buf = arena.view(region, (counts[e], x.shape[1]), x.dtype)
        torch.index_select(x, 0, rows, out=buf)
        out[rows] = run(e, buf)
        arena.free(region)
    return out


def ping_pong(arena: Arena, nbytes: int, turns: int) -> Iterator[tuple[Region, Region]]:
    """Two regions that change places at each turn."""
    with ExitStack() as stack:
        pair = []
        for _ in range(2):
            region = arena.alloc(nbytes)  # clean: near miss, the stack frees it, also when the second one fails or the consumer stops
            stack.callback(arena.free, region)
            pair.append(region)
        a, b = pair
        for _ in range(turns):
            yield a, b
            a, b = b, a


@dataclass
class Graph:
    batch: int
    handle: object
    regions: list[Region]
    cleanup: ExitStack = field(repr=False, default_factory=ExitStack)


class GraphCache:
    def __init__(self, arena: Arena, record: Callable[[int, list[Region]], object]) -> None:
        self.arena = arena
        self.record = record
        self._graphs: dict[int, Graph] = {}

    def capture(self, batch: int, sizes: list[int]) -> Graph:
        if (known := self._graphs.get(batch)) is not None:
            return known
        with ExitStack() as stack:
            regions = []
            for size in sizes:
                regions.append(self.arena.alloc(size * batch))  # clean: near miss, freed by the stack, which moves into the graph on success
                stack.callback(self.arena.free, regions[-1])
            handle = self.record(batch, regions)
            if handle is None:
                raise CaptureError(f"batch {batch}")
            graph = Graph(batch, handle, regions, stack.pop_all())
        self._graphs[batch] = graph
        return graph

    def evict(self, batch: int) -> None:
        if (graph := self._graphs.pop(batch, None)) is not None:
            graph.cleanup.close()

    def close(self) -> None:
        for batch in list(self._graphs):
            self.evict(batch)


class SplitK:
    """Partial sums and semaphores of split-k kernels, both long-lived."""

    def __init__(self, arena: Arena, m: int, n: int, parts: int) -> None:
        self.arena = arena
        self.partial = arena.alloc_top(m * n * parts * 4)  # clean: freed by close()
        try:
            self.locks = arena.alloc_top(m * n // 64 * 4)  # leak: close() frees only the partial sums
        except ArenaFull:
            arena.free(self.partial)
            raise

    def close(self) -> None:
        self.arena.free(self.partial)


class Workspaces:
    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._by_key: dict[str, Region] = {}

    def ensure(self, key: str, nbytes: int) -> Region:
        old = self._by_key.get(key)
        if old is not None and old.size >= nbytes:
            return old
        new = self.arena.alloc(nbytes)  # leak: when it is replaced while small the guard below does not free it
        self._by_key[key] = new
        if old is not None and old.size >= MIN_SPAN:
            self.arena.free(old)
        return new

    def close(self) -> None:
        for region in self._by_key.values():
            self.arena.free(region)
        self._by_key.clear()
