import bisect
import logging
import weakref
from typing import Callable, Dict, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)

CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128]


class StaticBuffers:
    """Input buffers with addresses that stay fixed for captured graphs."""

    def __init__(self, max_bs: int, hidden: int) -> None:
        self.max_bs = max_bs
        self.hidden = hidden
        self._stack: List[torch.Tensor] = []
        self._live: Dict[int, torch.Tensor] = {}

    def acquire_input(self, bs: int) -> torch.Tensor:
        if self._stack:
            t = self._stack.pop()  # clean: returned to the caller and recorded as live
        else:
            t = torch.zeros(self.max_bs, self.hidden)
        self._live[t.data_ptr()] = t
        return t[:bs]

    def release_input(self, view: torch.Tensor) -> None:
        base = self._live.pop(view.data_ptr())
        self._stack.append(base)

    def shrink(self, keep: int) -> int:
        dropped = 0
        while len(self._stack) > keep:
            self._stack.pop()  # clean: near miss, shrinking means to drop idle buffers
            dropped += 1
        return dropped

    def largest_idle(self, min_rows: int) -> Optional[torch.Tensor]:
        while self._stack:
            t = self._stack.pop()  # leak: buffers with too few rows are popped and lost on the way
            if t.shape[0] >= min_rows:
                self._live[t.data_ptr()] = t
                return t
        return None


class CapturedGraph:
    def __init__(self, bs: int, fn: Callable[[torch.Tensor], torch.Tensor], buffers: StaticBuffers) -> None:
        self.bs = bs
        self.fn = fn
        self.buffers = buffers
        self.inp = buffers.acquire_input(bs)  # clean: near miss, destroy() releases it
        self.mask: Optional[torch.Tensor] = buffers.acquire_input(bs)  # leak: destroy() forgets the mask

    def replay(self, x: torch.Tensor) -> torch.Tensor:
        self.inp[: x.shape[0]].copy_(x)
        if self.mask is not None:
            self.mask.zero_()
            self.mask[: x.shape[0]] = 1
        return self.fn(self.inp)[: x.shape[0]].clone()

    def destroy(self) -> None:
        self.buffers.release_input(self.inp)
        self.mask = None


class EmbedGraph:
    def __init__(self, bs: int, buffers: StaticBuffers) -> None:
        self.inp = buffers.acquire_input(bs)  # clean: near miss, the finalizer releases it
        self._fin = weakref.finalize(self, buffers.release_input, self.inp)

    def run(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        self.inp[: ids.shape[0]].copy_(table[ids])
        return self.inp[: ids.shape[0]].clone()


class GraphRunner:
    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor], buffers: StaticBuffers, eager_above: int = 64) -> None:
        self.fn = fn
        self.buffers = buffers
        self.eager_above = eager_above
        self.graphs: Dict[int, CapturedGraph] = {}

    def _bucket(self, n: int) -> Optional[int]:
        i = bisect.bisect_left(CAPTURE_SIZES, n)
        return CAPTURE_SIZES[i] if i < len(CAPTURE_SIZES) else None

    def capture(self, bs: int) -> CapturedGraph:
        graph = self.graphs.get(bs)
        if graph is None:
            graph = self.graphs[bs] = CapturedGraph(bs, self.fn, self.buffers)
        return graph

    def run(self, x: torch.Tensor) -> torch.Tensor:
        bucket = self._bucket(x.shape[0])
        if bucket is None or bucket > self.eager_above:
            return self.fn(x)
        return self.capture(bucket).replay(x)

    def run_padded(self, x: torch.Tensor) -> torch.Tensor:
        bucket = self._bucket(x.shape[0])
        padded = self.buffers.acquire_input(bucket or x.shape[0])  # leak: for large batches the eager result is returned with the input held
        if bucket is None or bucket > self.eager_above:
            logger.debug("batch of %d runs eagerly", x.shape[0])
            return self.fn(x)
        padded.zero_()
        padded[: x.shape[0]].copy_(x)
        y = self.fn(padded)[: x.shape[0]].clone()
        self.buffers.release_input(padded)
        return y

    def warmup(self, rounds: int = 3) -> List[Tuple[int, float]]:
        norms = []
        for bs in CAPTURE_SIZES:
            if bs > self.buffers.max_bs:
                break
            inp = self.buffers.acquire_input(bs)  # clean: near miss, the break is above the acquisition
            for _ in range(rounds):
                y = self.fn(inp)
            norms.append((bs, float(y.norm())))
            self.buffers.release_input(inp)
        return norms

    def profile(self, bs: int, rounds: int) -> Optional[float]:
        inp = self.buffers.largest_idle(bs)  # leak: stops early at a non-finite output and does not release
        if inp is None:
            return None
        best = float("inf")
        for _ in range(rounds):
            y = self.fn(inp[:bs])
            if not torch.isfinite(y).all():
                return None
            best = min(best, float(y.abs().max()))
        self.buffers.release_input(inp)
        return best

    def shadow(self, x: torch.Tensor) -> bool:
        a = self.buffers.acquire_input(x.shape[0])  # clean: released at the end
        b = self.buffers.acquire_input(x.shape[0])  # clean: released at the end
        a.copy_(x)
        b.copy_(x)
        same = torch.equal(self.fn(a), self.fn(b))
        for buf in (b, a):
            self.buffers.release_input(buf)
        return same

    def destroy(self) -> None:
        while self.graphs:
            _, g = self.graphs.popitem()
            g.destroy()
