"""Benchmarks and smoke tests for the scratch tensor pool.

    python bench_pool.py --iters 200 --csv results.csv
"""
from __future__ import annotations

import argparse
import csv
import json
import time
import unittest
from pathlib import Path
from typing import Callable, Dict, List, Optional, Set, Tuple

import torch


class ScratchPool:
    """Set of free tensors per element count."""

    def __init__(self, device: str = "cpu", cap: int = 64) -> None:
        self.device = device
        self.cap = cap
        self.free: Dict[int, Set[torch.Tensor]] = {}
        self.outstanding = 0

    def acquire(self, *shape: int) -> torch.Tensor:
        numel = 1
        for s in shape:
            numel *= s
        self.outstanding += 1
        ready = self.free.get(numel)
        if ready:
            return ready.pop().view(*shape)  # clean: counted in outstanding and returned
        return torch.empty(numel, device=self.device).view(*shape)

    def release(self, t: torch.Tensor) -> None:
        self.outstanding -= 1
        ready = self.free.setdefault(t.numel(), set())
        if len(ready) < self.cap:
            ready.add(t.view(-1))

    def acquire_many(self, n: int, *shape: int) -> List[torch.Tensor]:
        return [self.acquire(*shape) for _ in range(n)]  # clean: list handed to the caller

    def release_many(self, ts: List[torch.Tensor]) -> None:
        for t in ts:
            self.release(t)


def timed(fn: Callable[[], object], iters: int) -> float:
    t0 = time.perf_counter()
    for _ in range(iters):
        fn()
    return (time.perf_counter() - t0) / iters


def bench_churn(pool: ScratchPool, shape: Tuple[int, ...], iters: int) -> float:
    def body() -> None:
        t = pool.acquire(*shape)  # clean: released in the same body
        t.fill_(1.0)
        pool.release(t)

    return timed(body, iters)


def bench_matmul(pool: ScratchPool, n: int, iters: int) -> Optional[float]:
    a = pool.acquire(n, n)  # leak: on the warm-up failure only b and c go back
    b, c = pool.acquire_many(2, n, n)  # clean: released on both returns
    a.normal_()
    b.normal_()
    torch.mm(a, b, out=c)
    if not torch.isfinite(c).all():
        pool.release_many([b, c])
        return None
    ms = timed(lambda: torch.mm(a, b, out=c), iters)
    pool.release_many([a, b, c])
    return ms


def bench_fanout(pool: ScratchPool, width: int, iters: int) -> float:
    best = float("inf")
    for _ in range(iters):
        t0 = time.perf_counter()
        ts = pool.acquire_many(width, 32, 32)  # clean: near miss, popped one by one until the list is empty
        while ts:
            pool.release(ts.pop())
        best = min(best, time.perf_counter() - t0)
    return best


def bench_growth(pool: ScratchPool, sizes: List[int]) -> Dict[int, float]:
    out = {}
    t = pool.acquire(sizes[0])  # clean: released in the first round of the loop or after it
    for n in sizes[1:]:
        t0 = time.perf_counter()
        pool.release(t)
        t = pool.acquire(n)  # clean: near miss, the previous tensor was released before rebinding
        out[n] = time.perf_counter() - t0
    pool.release(t)
    return out


def write_csv(path: str, rows: List[Tuple[str, float]], append: bool) -> bool:
    fh = open(path, "a" if append else "w", newline="")  # leak: nothing to write returns with the file open
    if not rows:
        return False
    w = csv.writer(fh)
    if not append:
        w.writerow(["name", "seconds"])
    w.writerows(rows)
    fh.close()
    return True


def load_baseline(path: Optional[str]) -> Dict[str, float]:
    if path is None:
        return {}
    return json.loads(Path(path).read_text())


class ScratchPoolTest(unittest.TestCase):
    def setUp(self) -> None:
        self.pool = ScratchPool()
        self.base = self.pool.acquire(4, 4)  # clean: near miss, tearDown releases it

    def tearDown(self) -> None:
        self.pool.release(self.base)

    def test_reuse(self) -> None:
        t = self.pool.acquire(8, 8)  # leak: the test returns early off the cpu
        if t.device.type != "cpu":
            return
        ptr = t.data_ptr()
        self.pool.release(t)
        again = self.pool.acquire(8, 8)  # clean: released at the end of the test
        self.assertEqual(ptr, again.data_ptr())
        self.pool.release(again)

    def test_shapes(self) -> None:
        for shape in [(2, 3), (3, 2), (6,)]:
            self.assertEqual(self.pool.acquire(*shape).numel(), 6)  # leak: used inside the assertion and dropped


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=200)
    ap.add_argument("--csv", default=None)
    ap.add_argument("--baseline", default=None)
    args = ap.parse_args()
    pool = ScratchPool()
    base = load_baseline(args.baseline)
    rows = [("churn", bench_churn(pool, (64, 64), args.iters))]
    ms = bench_matmul(pool, 256, args.iters)
    if ms is not None:
        rows.append(("matmul", ms))
    rows.append(("fanout", bench_fanout(pool, 16, args.iters)))
    rows.extend((f"growth{n}", s) for n, s in bench_growth(pool, [16, 256, 4096]).items())
    for name, sec in rows:
        print(f"{name:12s} {sec * 1e6:10.2f}us {base.get(name, 0.0) * 1e6:10.2f}us")
    if args.csv:
        write_csv(args.csv, rows, append=False)


if __name__ == "__main__":
    main()
