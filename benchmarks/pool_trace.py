"""Replays recorded allocation traces through the pool, plain torch and simulated policies, and prints the
figures side by side.

`python -m benchmarks.pool_trace [TRACE ...] [--steps N] [--limit 1.1] [--million]`. A trace is replayed in a
circle until N steps are done. The limit is a multiple of the peak of live bytes. `--million` goes on to a
million steps; see `until_it_repeats`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch

import reference_modules.pool
from benchmarks.machine import machine_facts
from benchmarks.traces.format import HERE, Trace, load
from benchmarks.traces.policies import all_policies
from reference_modules.pool import PoolError, TensorPool
from reference_modules.pool.blocks import LARGE
from reference_modules.pool.store import BlockStore

RESULTS = Path(__file__).parent / "results" / "pool_trace.json"
MILLION = 1_000_000
TOUCHED_LOOPS = 2
COLUMNS = {
    "policy": 28,
    "hits": 10,
    "misses": 10,
    "refused": 9,
    "evicted": 10,
    "overhead": 10,
    "internal": 10,
}


class PoolReplay:
    """Our pool under a trace; drops its handle on release, as a caller should."""

    def __init__(self, limit: int | None, threshold_mb: float | None = 0) -> None:
        self.store = BlockStore()
        self.pool = TensorPool(max_bytes=limit, threshold_mb=threshold_mb, name="replayed", store=self.store)
        self.held: dict[int, torch.Tensor] = {}
        self.refused = 0

    def allocate(self, number: int, nbytes: int) -> None:
        try:
            self.held[number] = self.pool.allocate((nbytes,), torch.uint8)
        except PoolError:
            self.refused += 1

    def free(self, number: int, nbytes: int) -> None:
        tensor = self.held.pop(number, None)
        if tensor is not None:
            self.pool.deallocate(tensor)

    def figures(self) -> dict[str, float]:
        stats, lost = self.pool.stats(), self.pool.fragmentation()
        return {
            "hits": stats.hits,
            "misses": stats.misses,
            "refused": stats.refused,
            "evictions": stats.evictions,
            "reserve_overhead": lost["reserve_overhead"],
            "internal": lost["internal"],
        }


class PlainReplay:
    """torch.empty and del."""

    def __init__(self) -> None:
        self.held: dict[int, torch.Tensor] = {}

    def allocate(self, number: int, nbytes: int) -> None:
        self.held[number] = torch.empty((nbytes,), dtype=torch.uint8)

    def free(self, number: int, nbytes: int) -> None:
        del self.held[number]


def replay(trace: Trace, target: Any, steps: int) -> int:
    """Whole circles of the trace until at least `steps` steps are done; returns how many were."""
    done = 0
    while done < steps:
        circle(trace, target)
        done += len(trace.steps)
    return done


def circle(trace: Trace, target: Any, touch: bool = False) -> None:
    """The trace once."""
    sizes: dict[int, int] = {}
    for _, number, nbytes in trace.events():
        if nbytes:
            sizes[number] = nbytes
            target.allocate(number, nbytes)
            if touch:
                target.held[number].fill_(1)
        else:
            target.free(number, sizes.pop(number))


def until_it_repeats(trace: Trace, limit: int, steps: int) -> dict[str, Any]:
    """The figures after `steps` steps, replaying only as long as something new happens.

    After a circle nothing is leased, so what the pool will do depends on its store's state alone. Once a
    state comes back, every later circle repeats those in between, and their counts can be multiplied instead
    of replayed.
    """
    target = PoolReplay(limit)
    seen: dict[object, tuple[int, dict[str, float]]] = {}
    circles, wanted = 0, -(-steps // len(trace.steps))
    while circles < wanted:
        figures, state = (
            target.figures(),
            target.store.state(),
        )  # in this order: figures takes in what has died
        if state in seen:
            break
        seen[state] = circles, figures
        circle(trace, target)
        circles += 1
    figures = target.figures()
    if circles < wanted:
        first, then = seen[target.store.state()]
        period = circles - first
        full, rest = divmod(wanted - circles, period)
        for name in ("hits", "misses", "refused", "evictions"):
            figures[name] += full * (figures[name] - then[name])
        before = target.figures()
        for _ in range(rest):
            circle(trace, target)
        for name in ("hits", "misses", "refused", "evictions"):
            figures[name] += target.figures()[name] - before[name]
        for name in ("reserve_overhead", "internal"):
            figures[name] = target.figures()[name]
    return {"steps": wanted * len(trace.steps), "replayed_circles": circles, **figures}


def bookkeeping(trace: Trace, limit: int, every: int = 100) -> float:
    """The most bytes the pool's own objects take, as a share of the bytes it holds at that moment."""
    tracemalloc.start()
    target, worst = PoolReplay(limit), 0.0
    sizes: dict[int, int] = {}
    here = tracemalloc.Filter(True, str(Path(reference_modules.pool.__file__).parent / "*"))
    for at, (_, number, nbytes) in enumerate(trace.events()):
        if nbytes:
            sizes[number] = nbytes
            target.allocate(number, nbytes)
        else:
            target.free(number, sizes.pop(number))
        held = target.pool.stats().bytes_reserved
        if at % every == every - 1 and held >= limit // 4:
            gc.collect()
            traced = tracemalloc.take_snapshot().filter_traces([here]).traces
            own = sum(entry.size for entry in traced if entry.size < 2048 or entry.size >= LARGE)
            worst = max(worst, own / held)
    tracemalloc.stop()
    return worst


def seconds(trace: Trace, target: Any) -> float:
    """Processor time of a circle with every byte written, on one thread: the better of two after a first."""
    circle(trace, target, touch=True)
    times = []
    for _ in range(TOUCHED_LOOPS):
        start = time.thread_time()
        circle(trace, target, touch=True)
        times.append(time.thread_time() - start)
    return min(times)


def touched(trace: Trace, limit: int) -> dict[str, float]:
    """What a circle of the trace costs when the memory is written too, beside torch.empty."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    plain = seconds(trace, PlainReplay())
    pools = {
        "everything pooled, limit": PoolReplay(limit),
        "everything pooled, no limit": PoolReplay(None),
        "default threshold, no limit": PoolReplay(None, None),
    }
    faster = {name: plain / seconds(trace, target) for name, target in pools.items()}
    torch.set_num_threads(before)
    return {"torch_seconds": plain, **faster}


def measure(trace: Trace, steps: int, factor: float, million: bool) -> dict[str, Any]:
    """Everything for one trace."""
    peak = trace.peak()
    limit = int(peak * factor)
    ours = PoolReplay(limit)
    done = replay(trace, ours, steps)
    rows = {"TensorPool": ours.figures()}
    for policy in all_policies(limit):
        replay(trace, policy, steps)
        rows[policy.name] = policy.figures()
    exact = rows["exact-fit LRU"]["hits"]
    result: dict[str, Any] = {
        "source": trace.source,
        "steps": done,
        "peak_live_bytes": peak,
        "max_bytes": limit,
        "policies": rows,
        "hits_of_exact_fit": round(rows["TensorPool"]["hits"] / exact, 4) if exact else None,
        "bookkeeping_share": bookkeeping(trace, limit),
        "times_faster_than_torch_when_touched": touched(trace, limit),
    }
    if million:
        result["million"] = until_it_repeats(trace, limit, MILLION)
    return result


def table(name: str, result: dict[str, Any]) -> str:
    """The figures as text."""
    head = (
        f"{name}: {result['steps']} steps, peak {result['peak_live_bytes']} B, limit {result['max_bytes']} B"
    )
    lines = [
        head,
        "  ".join(f"{name:>{width}}" for name, width in COLUMNS.items()),
    ]
    rows = dict(result["policies"])
    if "million" in result:
        rows[f"TensorPool, {result['million']['steps']} steps"] = result["million"]
    for policy, row in rows.items():
        lines.append(
            f"{policy:>28}{row['hits']:>10}{row['misses']:>10}{row['refused']:>9}{row['evictions']:>10}"
            f"{row['reserve_overhead']:>10.2%}{row['internal']:>10.2%}"
        )
    times = dict(result["times_faster_than_torch_when_touched"])
    plain = times.pop("torch_seconds")
    lines.append(
        f"  hits of exact-fit LRU: {result['hits_of_exact_fit']}; "
        f"bookkeeping {result['bookkeeping_share']:.3%} of the bytes held"
    )
    lines.append(f"  memory written, processor time: torch.empty {plain:.2f} s a circle; pool, times faster:")
    lines.append("   " + "; ".join(f" {name} {faster:.2f}" for name, faster in times.items()))
    return "\n".join(lines)


def main() -> None:
    """Replay, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("traces", nargs="*", type=Path, default=sorted(HERE.glob("*.json.gz")))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--limit", type=float, default=1.1, help="max_bytes as a multiple of the peak of live bytes"
    )
    parser.add_argument("--million", action="store_true", help="also the figures after a million steps")
    options = parser.parse_args()
    results = {}
    for path in options.traces:
        trace = load(path)
        results[trace.name] = measure(trace, options.steps, options.limit, options.million)
        print(table(trace.name, results[trace.name]), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine_facts(), "traces": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
