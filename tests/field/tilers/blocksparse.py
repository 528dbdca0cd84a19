"""Block-sparse attention launches and their scratch (LUTs, split-K partials, semaphores)."""
from __future__ import annotations

import logging
import time
from collections import OrderedDict
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

log = logging.getLogger(__name__)


class KernelError(RuntimeError):
    pass


class OutOfResources(KernelError):
    pass


class ScratchExhausted(RuntimeError):
    pass


class Scratch:
    __slots__ = ("size_class", "data")

    def __init__(self, size_class: int) -> None:
        self.size_class = size_class
        self.data = bytearray(1 << size_class)

    def __len__(self) -> int:
        return len(self.data)


class ScratchAllocator:
    """Power-of-two scratch with a cap per size class."""

    def __init__(self, per_class: int = 4) -> None:
        self.per_class = per_class
        self._free: Dict[int, List[Scratch]] = {}
        self._live: Dict[int, int] = {}

    def get_scratch(self, nbytes: int) -> Scratch:
        cls = max(8, (nbytes - 1).bit_length())
        free = self._free.setdefault(cls, [])
        if free:
            return free.pop()
        if self._live.get(cls, 0) >= self.per_class:
            raise ScratchExhausted(f"class {cls}")
        self._live[cls] = self._live.get(cls, 0) + 1
        return Scratch(cls)

    def put_scratch(self, s: Scratch) -> None:
        self._free[s.size_class].append(s)


Kernel = Callable[[Scratch, Dict[str, int]], float]


def autotune(kernel: Kernel, configs: Sequence[Dict[str, int]], alloc: ScratchAllocator) -> Optional[Dict[str, int]]:
    best, best_t = None, float("inf")
    for cfg in configs:
        partials = alloc.get_scratch(cfg["block_m"] * cfg["split_k"] * 4)  # leak: OutOfResources moves on to the next config
        try:
            t0 = time.perf_counter()
            kernel(partials, cfg)
            elapsed = time.perf_counter() - t0
        except OutOfResources:
            log.debug("skipping %s", cfg)
            continue
        alloc.put_scratch(partials)
        if elapsed < best_t:
            best, best_t = cfg, elapsed
    return best


def autotune_pruned(kernel: Kernel, configs: Sequence[Dict[str, int]], alloc: ScratchAllocator, budget: int):
    timings: List[Tuple[float, int]] = []
    for i, cfg in enumerate(configs):
        nbytes = cfg["block_m"] * cfg["split_k"] * 4
        if nbytes > budget:
            continue
        partials = alloc.get_scratch(nbytes)  # clean: near miss, except, else and normal exit all put it back
        try:
            t = kernel(partials, cfg)
        except OutOfResources:
            alloc.put_scratch(partials)
            continue
        else:
            alloc.put_scratch(partials)
        if t < 0:
            continue
        timings.append((t, i))
    return min(timings, default=None)


def launch_growing(kernel: Kernel, cfg: Dict[str, int], need: Callable[[int], bool], alloc: ScratchAllocator) -> float:
    nbytes = 256
    for _ in range(6):
        s = alloc.get_scratch(nbytes)  # leak: a scratch found too small is replaced by the next one
        if not need(len(s)):
            nbytes *= 2
            continue
        t = kernel(s, cfg)
        alloc.put_scratch(s)
        return t
    raise KernelError("no scratch size fits")


def launch_growing_from(kernel: Kernel, cfg: Dict[str, int], need: Callable[[int], bool], alloc: ScratchAllocator) -> float:
    s = alloc.get_scratch(256)  # clean: near miss, put back before s is rebound, and after the launch
    while not need(len(s)):
        bigger = len(s) * 2
        alloc.put_scratch(s)
        s = alloc.get_scratch(bigger)  # clean: near miss, put back before the next rebinding or after the launch
    t = kernel(s, cfg)
    alloc.put_scratch(s)
    return t


class SplitKLaunch:
    """Holds the partial sums of one split-K launch."""

    def __init__(self, alloc: ScratchAllocator, nbytes: int) -> None:
        self.alloc = alloc
        self.nbytes = nbytes
        self.partials: Optional[Scratch] = None

    def __enter__(self) -> "SplitKLaunch":
        self.partials = self.alloc.get_scratch(self.nbytes)  # leak: __exit__ returns early on a kernel error, which run_split_k survives
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None:
            log.warning("split-k launch failed: %s", exc)
            return False
        self.alloc.put_scratch(self.partials)
        self.partials = None
        return False


class SemaphoreScratch:
    """Zeroed counters shared by the CTAs of one launch."""

    def __init__(self, alloc: ScratchAllocator, ctas: int) -> None:
        self.alloc = alloc
        self.ctas = ctas

    def __enter__(self) -> Scratch:
        self._s = self.alloc.get_scratch(self.ctas * 4)  # clean: near miss, __exit__ puts it back before its early return
        return self._s

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.alloc.put_scratch(self._s)
        if exc_type is None:
            return False
        log.warning("launch with %d CTAs failed", self.ctas)
        return issubclass(exc_type, OutOfResources)


def run_split_k(kernel: Kernel, cfg: Dict[str, int], alloc: ScratchAllocator) -> float:
    try:
        with SplitKLaunch(alloc, cfg["block_m"] * cfg["split_k"] * 4) as launch:  # clean: a with block, the class owns the scratch
            return kernel(launch.partials, cfg)
    except KernelError:
        return kernel(Scratch(8), {**cfg, "split_k": 1})


def run_streamk(kernel: Kernel, cfg: Dict[str, int], alloc: ScratchAllocator) -> Optional[float]:
    with SemaphoreScratch(alloc, cfg["block_m"]) as sem:  # clean: with block, put back by __exit__
        return kernel(sem, cfg)
    return None


class LayoutCache:
    """LUTs by layout key, least recently used first."""

    def __init__(self, alloc: ScratchAllocator, capacity: int) -> None:
        self.alloc = alloc
        self.capacity = capacity
        self._luts: "OrderedDict[Any, Scratch]" = OrderedDict()
        self._headers: Dict[Any, Scratch] = {}

    def lut(self, key: Any, nnz: int) -> Scratch:
        if key in self._luts:
            self._luts.move_to_end(key)
            return self._luts[key]
        self._luts[key] = self.alloc.get_scratch(nnz * 8)  # clean: kept in the cache, put back on eviction
        while len(self._luts) > self.capacity:
            _, old = self._luts.popitem(last=False)
            self.alloc.put_scratch(old)
        return self._luts[key]

    def refresh_header(self, key: Any, rows: int) -> None:
        self._headers[key] = self.alloc.get_scratch(rows * 4)  # leak: refreshing a known key overwrites its header
        self._headers[key].data[0] = 1

    def clear(self) -> None:
        for s in list(self._luts.values()) + list(self._headers.values()):
            self.alloc.put_scratch(s)
        self._luts.clear()
        self._headers.clear()


def plan(alloc: ScratchAllocator, rows: int, nnz: int) -> Optional[Tuple[Scratch, Scratch]]:
    offsets = alloc.get_scratch(rows * 4)  # clean: put back when the indices do not fit, otherwise returned
    try:
        indices = alloc.get_scratch(nnz * 4)  # clean: returned with the offsets
    except ScratchExhausted:
        alloc.put_scratch(offsets)
        return None
    return offsets, indices


def sparse_forward(kernel: Kernel, cfg: Dict[str, int], alloc: ScratchAllocator, workspace: Optional[Scratch] = None) -> float:
    own = workspace is None
    if own:
        workspace = alloc.get_scratch(cfg["block_m"] * 4)  # clean: near miss, own decides and does not change
    t = kernel(workspace, cfg)
    if own:
        alloc.put_scratch(workspace)
    return t


def sparse_backward(kernel: Kernel, cfg: Dict[str, int], nnz: int, alloc: ScratchAllocator, workspace: Optional[Scratch] = None) -> float:
    own = workspace is None
    if own:
        workspace = alloc.get_scratch(cfg["block_m"] * 4)  # leak: an empty layout returns before the put
    if nnz == 0:
        return 0.0
    t = kernel(workspace, cfg)
    if own:
        alloc.put_scratch(workspace)
    return t


def plan_and_run(kernel: Kernel, cfg: Dict[str, int], alloc: ScratchAllocator, rows: int, nnz: int) -> Optional[float]:
    planned = plan(alloc, rows, nnz)  # leak: the indices are used and never put back
    if planned is None:
        return None
    offsets, indices = planned
    t = kernel(indices, cfg)
    alloc.put_scratch(offsets)
    return t


if __name__ == "__main__":
    a = ScratchAllocator(8)
    c = {"block_m": 64, "split_k": 2}
    k = lambda s, cfg: float(len(s))  # noqa: E731
    print(autotune(k, [c], a), autotune_pruned(k, [c], a, 1 << 20), launch_growing(k, c, lambda n: n >= 256, a))
    print(launch_growing_from(k, c, lambda n: n > 1000, a), run_split_k(k, c, a), run_streamk(k, c, a))
    print(sparse_forward(k, c, a), sparse_backward(k, c, 1, a), plan_and_run(k, c, a, 8, 8))
    lc = LayoutCache(a, 2)
    for i in range(4):
        lc.lut(i, 4)
    lc.refresh_header("x", 4)
    lc.clear()
