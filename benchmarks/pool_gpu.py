"""The native pool beside the CUDA caching allocator under it: `python -m benchmarks.pool_gpu [--rounds N]`.

A hit: how many microseconds `allocate` and `deallocate` take more than `torch.empty` and `del`, in turn, both
served from memory that the allocator has cached.  Fragmentation: 1 − peak allocated / peak reserved of the
allocator itself, after steps of variable length.  All in a child process for each allocator setting, which is
read at start.  Without a GPU it says so, writes nothing and ends with 2.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import machine_facts
from reference_modules.pool import TensorPool

RESULTS = Path(__file__).parent / "results"
CALLS = 200
STEPS = 1000
SIZES = (1 << 12, 1 << 20, 1 << 26)
SETTINGS = {"default segments": "", "expandable segments": "expandable_segments:True"}


def hit(nbytes: int, rounds: int) -> dict[str, float]:
    """Medians over rounds of what one allocation and its release take, plain and through the pool."""
    pool = TensorPool("cuda", threshold_mb=0)
    plain, pooled = [], []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(CALLS):
            x = torch.empty((nbytes,), dtype=torch.uint8, device="cuda")
            del x
        middle = time.perf_counter()
        for _ in range(CALLS):
            x = pool.allocate((nbytes,), torch.uint8)
            pool.deallocate(x)
            del x
        plain.append((middle - begun) / CALLS)
        pooled.append((time.perf_counter() - middle) / CALLS)
    pool.close()
    more = [b - a for a, b in zip(plain, pooled, strict=True)]
    return {
        "bytes": nbytes,
        "torch_empty_us": round(median(plain) * 1e6, 2),
        "pool_us": round(median(pooled) * 1e6, 2),
        "more_us": round(median(more) * 1e6, 2),
    }


def variable_steps(pooled: bool) -> dict[str, float]:
    """Peaks of the allocator over steps of an attention layer with a length drawn anew each time."""
    draw = random.Random(0)
    pool = TensorPool("cuda", threshold_mb=0) if pooled else None

    def take(n: int) -> torch.Tensor:
        shape = (n, 8, 64)
        if pool is not None:
            return pool.allocate(shape, torch.bfloat16)
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    for _ in range(STEPS):
        n = draw.randrange(1000, 65000)
        held = (
            [take(n) for _ in range(6)] + [take(n // 2) for _ in range(5)] + [take(n // 4) for _ in range(5)]
        )
        draw.shuffle(held)
        while held:
            tensor = held.pop()
            if pool is not None:
                pool.deallocate(tensor)
            del tensor
    stats = torch.cuda.memory_stats()
    allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return {
        "peak_allocated": allocated,
        "peak_reserved": reserved,
        "reserve_overhead": round(1 - allocated / reserved, 4),
    }


def in_a_child(setting: str, *arguments: str) -> Any:
    """What this module prints there as JSON."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
    command = [sys.executable, "-m", "benchmarks.pool_gpu", *arguments]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--write", type=Path, help="default: results/pool-gpu-DEVICE.json")
    parser.add_argument("--steps-here", choices=["pool", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--hits-here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("pool on a GPU: not measured: no CUDA device here", file=sys.stderr)
        return 2
    if options.steps_here:
        print(json.dumps(variable_steps(options.steps_here == "pool")))
        return 0
    if options.hits_here:
        gc.disable()
        print(json.dumps([hit(nbytes, options.rounds) for nbytes in SIZES]))
        return 0
    result = {
        "machine": machine_facts(),
        "device": torch.cuda.get_device_name(0),
        "cuda": torch.version.cuda,
        "hit": {
            name: in_a_child(setting, "--hits-here", "--rounds", str(options.rounds))
            for name, setting in SETTINGS.items()
        },
        "after_1000_variable_steps": {
            f"{who}, {name}": in_a_child(setting, "--steps-here", who)
            for name, setting in SETTINGS.items()
            for who in ("plain", "pool")
        },
    }
    slug = "-".join(str(result["device"]).lower().split())
    file = options.write or RESULTS / f"pool-gpu-{slug}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
