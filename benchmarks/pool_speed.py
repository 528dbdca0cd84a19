"""How fast the pool is beside plain torch, as ratios within one run: `python -m benchmarks.pool_speed
[--rounds N]`.

Both sides of every comparison alternate in the same process, so that a busy machine slows both. Fixed costs
are medians of many short rounds, and the smallest round is printed beside them: on a shared machine only that
one comes near the code's own cost. The 64 MB figures are taken in two child processes: the default C library,
and one told to keep freed memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.machine import machine_facts
from reference_modules.pool import TensorPool

RESULTS = Path(__file__).parent / "results" / "pool_speed.json"
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
TUNED_HARDER = {**TUNED, "MALLOC_MMAP_MAX_": "0"}
CALLS = 300
LARGE_BYTES = 64 << 20


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    start = clock()
    work()
    return clock() - start


def microseconds(samples: list[float]) -> dict[str, float]:
    """Median and smallest of per-call times."""
    return {"median_us": round(median(samples) * 1e6, 3), "least_us": round(min(samples) * 1e6, 3)}


def bypassed(shape: tuple[int, ...], rounds: int) -> dict[str, object]:
    """What an allocation below the threshold costs over the same torch.empty call, and what its release
    costs.
    """
    pool, device = TensorPool("cpu"), torch.device("cpu")
    plain, pooled, extra, release = [], [], [], []
    for _ in range(rounds):
        gc.disable()
        begin = time.perf_counter()
        held = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(CALLS)]
        middle = time.perf_counter()
        del held
        again = time.perf_counter()
        leases = [pool.allocate(shape, torch.float32) for _ in range(CALLS)]
        end = time.perf_counter()
        release.append(timed(lambda leases=leases: [pool.deallocate(lease) for lease in leases]) / CALLS)
        gc.enable()
        plain.append((middle - begin) / CALLS)
        pooled.append((end - again) / CALLS)
        extra.append(pooled[-1] - plain[-1])
        del leases
    return {
        "shape": shape,
        "torch_empty": microseconds(plain),
        "allocate": microseconds(pooled),
        "extra": {
            **microseconds(extra),
            "least_against_least_us": round((min(pooled) - min(plain)) * 1e6, 3),
        },
        "ratio": round(median(b / a for a, b in zip(plain, pooled, strict=True)), 2),
        "release": microseconds(release),
    }


def pooled_cycle(rounds: int) -> dict[str, object]:
    """A hit and its release without touching the memory: the cost of the bookkeeping alone."""
    pool = TensorPool("cpu", threshold_mb=0)
    hit, release = [], []
    for _ in range(rounds):
        hits = releases = 0.0
        for _ in range(CALLS // 4):
            begin = time.perf_counter()
            tensor = pool.allocate((4, 1024, 64))
            middle = time.perf_counter()
            pool.deallocate(tensor)
            releases += time.perf_counter() - middle
            hits += middle - begin
        hit.append(hits / (CALLS // 4))
        release.append(releases / (CALLS // 4))
    return {"hit": microseconds(hit), "release": microseconds(release)}


def growth(rounds: int) -> dict[str, object]:
    """Allocate and release with ever more leases alive."""
    pool = TensorPool("cpu")
    held: list[torch.Tensor] = []
    times: dict[str, dict[str, float]] = {}
    for live in (1, 10, 100, 1_000, 10_000, 100_000):
        held.extend(pool.allocate((16,)) for _ in range(live - len(held)))
        samples = []
        gc.disable()
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(CALLS):
                pool.deallocate(pool.allocate((16,)))
            samples.append((time.perf_counter() - begin) / CALLS)
        gc.enable()
        times[str(live)] = microseconds(samples)
    for tensor in held:
        pool.deallocate(tensor)
    return {
        "live": times,
        "ratio_last_to_first": round(times["100000"]["least_us"] / times["1"]["least_us"], 2),
    }


TOUCHES: dict[str, Callable[[torch.Tensor], object]] = {
    "every_page": lambda tensor: tensor[:: 4096 // 4].fill_(1.0),
    "every_byte": lambda tensor: tensor.fill_(1.0),
}


def large_here(rounds: int) -> dict[str, dict[str, float]]:
    """A 64 MB tensor and its first touch: a pool's hit and torch.empty in turn, in this process.

    Touching every page is the allocation's own cost; writing every byte adds the machine's bandwidth to both
    sides. One thread, so that processor time can be read too: it leaves out when others had the processor.
    """
    torch.set_num_threads(1)
    return {name: _hit_against_empty(touch, rounds) for name, touch in TOUCHES.items()}


def _hit_against_empty(touch: Callable[[torch.Tensor], object], rounds: int) -> dict[str, float]:
    pool = TensorPool("cpu", threshold_mb=0)
    shape = (LARGE_BYTES // 4,)

    def hit() -> None:
        with pool.lease(shape) as tensor:
            touch(tensor)

    def plain() -> None:
        touch(torch.empty(shape, dtype=torch.float32))

    hit()
    plain()
    pairs = [(timed(plain), timed(hit)) for _ in range(rounds)]
    worked = [(timed(plain, time.thread_time), timed(hit, time.thread_time)) for _ in range(rounds)]
    return {
        "torch_empty_us": round(median(p for p, _ in pairs) * 1e6),
        "hit_us": round(median(h for _, h in pairs) * 1e6),
        "times_faster": round(median(p / h for p, h in pairs), 2),
        "times_faster_by_processor_time": round(median(p / h for p, h in worked), 2),
    }


def large(environment: dict[str, str], rounds: int) -> dict[str, dict[str, float]]:
    """`large_here` in a child process, because the C library reads its settings at start."""
    command = [sys.executable, "-m", "benchmarks.pool_speed", "--large-here", "--rounds", str(rounds)]
    answer = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(answer.stdout)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=301)
    parser.add_argument("--large-here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large_here:
        print(json.dumps(large_here(options.rounds)))
        return
    large_rounds = max(options.rounds // 7, 9)
    result = {
        "machine": machine_facts(),
        "load": os.getloadavg()[0],
        "bypassed": [bypassed(shape, options.rounds) for shape in ((16,), (4, 64, 64))],
        "pooled": pooled_cycle(options.rounds),
        "growth": growth(max(options.rounds // 4, 5)),
        "large_default_libc": large({}, large_rounds),
        "large_tuned_libc": large(TUNED, large_rounds),
        "large_libc_without_mmap": large(TUNED_HARDER, large_rounds),
        "gpu": "not measured: no CUDA device here"
        if not torch.cuda.is_available()
        else "see benchmarks/pool_gpu.py",
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
