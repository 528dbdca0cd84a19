"""Decides what is offloaded, from trials before the run."""
from __future__ import annotations

import time
from typing import Iterable, List, Optional, Tuple

import torch

from .hooks import LayerCache, OffloadHooks
from .slabs import PageRun, SlabSet


def bandwidth(slabs: SlabSet, sample: torch.Tensor, floor: float) -> Optional[float]:
    """Bytes per second to the host; None when the trial is too short to tell."""
    run = slabs.draw(sample.numel())  # leak: a trial that is too short returns without close
    if run is None:
        return None
    start = time.perf_counter()
    run.write(sample)
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    if took < floor:
        return None
    run.close()
    return sample.numel() / took


def headroom(slabs: SlabSet, step: int) -> int:
    """Bytes that can be drawn at present in pieces of `step`."""
    runs: List[PageRun] = []
    while True:
        run = slabs.draw(step)  # clean: near miss, collected and closed below
        if run is None:
            break
        runs.append(run)
    for run in runs:
        run.close()
    return len(runs) * step


def both_ways(slabs: SlabSet, sample: torch.Tensor) -> Optional[Tuple[float, float]]:
    runs = slabs.draw_mirrored(sample.numel())  # leak: only the first of the runs is closed
    if not runs:
        return None
    first = runs[0]
    start = time.perf_counter()
    first.write(sample)
    middle = time.perf_counter()
    first.read()
    end = time.perf_counter()
    first.close()
    return middle - start, end - middle


def choose_layers(cache: LayerCache, outputs: Iterable[Tuple[int, torch.Tensor]], budget: int) -> List[int]:
    chosen: List[int] = []
    for layer, out in outputs:
        size = out.numel() * out.element_size()
        if size > budget or not cache.put(layer, "trial", out):
            continue
        chosen.append(layer)
        budget -= size
        cache.drop_layer(layer)
    return chosen


def train_step(block: torch.nn.Module, x: torch.Tensor, hooks: OffloadHooks) -> Tuple[float, int]:
    with hooks:
        loss = block(x).square().mean()
    loss.backward()
    return float(loss), hooks.end_step()
