"""Scratch arena behind the split-KV attention kernels: partial outputs, LSE rows and planner tables."""
from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)

ALIGN = 256
MAX_SPLITS = 32


@dataclass
class Slab:
    offset: int
    nbytes: int


class WorkspaceArena:
    """First-fit arena over one big device tensor; slabs are carved and restored."""

    def __init__(self, nbytes: int, device: str = "cuda"):
        self._buf = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._holes: list[tuple[int, int]] = [(0, nbytes)]
        self._live: dict[int, Slab] = {}
        self._mu = threading.Lock()

    def carve(self, nbytes: int) -> Slab | None:
        need = (nbytes + ALIGN - 1) // ALIGN * ALIGN
        with self._mu:
            for i, (start, size) in enumerate(self._holes):
                if size < need:
                    continue
                if size == need:
                    self._holes.pop(i)
                else:
                    self._holes[i] = (start + need, size - need)
                slab = Slab(start, need)
                self._live[start] = slab
                return slab
        return None

    def restore(self, slab: Slab) -> None:
        with self._mu:
            if self._live.pop(slab.offset, None) is None:
                return
            self._holes.append((slab.offset, slab.nbytes))
            self._holes.sort()
            merged: list[tuple[int, int]] = []
            for start, size in self._holes:
                if merged and merged[-1][0] + merged[-1][1] == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((start, size))
            self._holes = merged

    def view(self, slab: Slab, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        flat = self._buf[slab.offset:slab.offset + slab.nbytes].view(dtype)
        return flat[:count].view(*shape)


@dataclass
class Plan:
    num_splits: int
    tmp_v: Slab
    tmp_s: Slab


def choose_splits(kv_len: int, sm_count: int, batch: int) -> int:
    by_occupancy = max(1, sm_count // max(1, batch))
    by_length = max(1, kv_len // 512)
    return min(MAX_SPLITS, by_occupancy, by_length)


def plan_decode(arena: WorkspaceArena, batch: int, heads: int, dim: int, kv_len: int, sms: int) -> Plan | None:
    splits = choose_splits(kv_len, sms, batch)
    tmp_v = arena.carve(batch * heads * splits * dim * 4)  # leak: kept when the second carve fails
    if tmp_v is None:
        log.warning("workspace exhausted for %d splits", splits)
        return None
    tmp_s = arena.carve(batch * heads * splits * 4)  # clean: moved into the plan, None otherwise
    if tmp_s is None:
        log.warning("no room for lse rows, batch=%d", batch)
        return None
    return Plan(splits, tmp_v, tmp_s)


def plan_prefill(arena: WorkspaceArena, tokens: int, heads: int, dim: int, tiles: int) -> Plan | None:
    tmp_v = arena.carve(tokens * heads * tiles * dim * 2)  # clean: restored when the second carve fails
    if tmp_v is None:
        return None
    tmp_s = arena.carve(tokens * heads * tiles * 4)  # clean: moved into the plan
    if tmp_s is None:
        arena.restore(tmp_v)
        return None
    return Plan(tiles, tmp_v, tmp_s)


class DecodeWrapper:
    """plan() is called by the scheduler for every step, finish() once at the end of serving."""

    def __init__(self, arena: WorkspaceArena, heads: int, dim: int, sms: int):
        self.arena, self.heads, self.dim, self.sms = arena, heads, dim, sms
        self._plan: Plan | None = None

    def plan(self, kv_lens: list[int]) -> int:
        longest = max(kv_lens)
        self._plan = plan_decode(self.arena, len(kv_lens), self.heads, self.dim, longest, self.sms)  # leak: each step overwrites the former plan
        return self._plan.num_splits if self._plan is not None else 1

    def run(self, q: torch.Tensor) -> torch.Tensor:
        if self._plan is None:
            return q
        shape = (q.shape[0], self.heads, self._plan.num_splits, self.dim)
        partial = self.arena.view(self._plan.tmp_v, torch.float32, shape)
        return partial.sum(dim=2).to(q.dtype)

    def finish(self) -> None:
        if self._plan is not None:
            self.arena.restore(self._plan.tmp_v)
            self.arena.restore(self._plan.tmp_s)
            self._plan = None


class PrefillWrapper:
    def __init__(self, arena: WorkspaceArena, heads: int, dim: int):
        self.arena, self.heads, self.dim = arena, heads, dim
        self._plan: Plan | None = None

    def plan(self, tokens: int, tiles: int) -> bool:
        self.reset()
        self._plan = plan_prefill(self.arena, tokens, self.heads, self.dim, tiles)  # clean: near miss, the former plan was reset above
        return self._plan is not None

    def reset(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            self.arena.restore(plan.tmp_v)
            self.arena.restore(plan.tmp_s)


def serve(arena: WorkspaceArena, steps: list[list[int]], q: torch.Tensor) -> torch.Tensor:
    wrapper = DecodeWrapper(arena, heads=32, dim=128, sms=132)
    out = q
    for kv_lens in steps:
        wrapper.plan(kv_lens)
        out = wrapper.run(out)
    wrapper.finish()
    return out


def merge_partials(arena: WorkspaceArena, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    rows, splits, dim = v.shape
    slab = arena.carve(rows * splits * 4)  # leak: the single-split return keeps the slab
    if slab is None:
        return (v * torch.softmax(s, dim=-1).unsqueeze(-1)).sum(dim=1)
    weights = arena.view(slab, torch.float32, (rows, splits))
    if splits == 1:
        return v.squeeze(1)
    torch.softmax(s, dim=-1, out=weights)
    merged = (v * weights.unsqueeze(-1)).sum(dim=1)
    arena.restore(slab)
    return merged


def decode_once(arena: WorkspaceArena, q: torch.Tensor, k: torch.Tensor, splits: int) -> torch.Tensor:
    slab = None
    if splits > 1:
        slab = arena.carve(q.numel() * splits * 4)  # clean: near miss, restored under the same guard
        if slab is None:
            splits = 1
    scores = q @ k.transpose(-1, -2)
    if splits > 1:
        acc = arena.view(slab, torch.float32, (splits, *q.shape))
        acc.zero_()
        scores = scores + acc.sum()
        arena.restore(slab)
    return scores


def sweep_tiles(arena: WorkspaceArena, tiles: list[int], probe) -> dict[int, float]:
    timings: dict[int, float] = {}
    for tile in tiles:
        slab = arena.carve(tile * tile * 4)  # leak: the continue for odd tiles skips the restore
        if slab is None:
            break
        if tile % 16:
            timings[tile] = math.inf
            continue
        timings[tile] = probe(arena.view(slab, torch.float32, (tile, tile)))
        arena.restore(slab)
    return timings


def gather_lse(arena: WorkspaceArena, lse: torch.Tensor) -> tuple[Slab, torch.Tensor] | None:
    slab = arena.carve(lse.numel() * 4)  # clean: handed to the caller with its view
    if slab is None:
        return None
    rows = arena.view(slab, torch.float32, tuple(lse.shape))
    rows.copy_(lse)
    return slab, rows


def log_lse_stats(arena: WorkspaceArena, lse: torch.Tensor) -> float:
    got = gather_lse(arena, lse)  # leak: only the copy is used, the slab is dropped
    if got is None:
        return float("nan")
    _, rows = got
    host = rows.cpu()
    log.info("lse min=%f max=%f", host.min(), host.max())
    return float(host.mean())


def rescale_by_lse(arena: WorkspaceArena, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    got = gather_lse(arena, lse)  # clean: restored after the scaling
    if got is None:
        return out
    slab, rows = got
    scaled = out * torch.exp(rows - rows.max()).unsqueeze(-1)
    arena.restore(slab)
    return scaled


def tree_reduce(arena: WorkspaceArena, parts: list[torch.Tensor]) -> torch.Tensor | None:
    level: list[tuple[Slab, torch.Tensor]] = []
    for part in parts:
        slab = arena.carve(part.numel() * 4)  # leak: the odd tail of a level is not carried to the next one
        if slab is None:
            break
        dst = arena.view(slab, torch.float32, tuple(part.shape))
        dst.copy_(part)
        level.append((slab, dst))
    while len(level) > 1:
        nxt = []
        for i in range(0, len(level) - 1, 2):
            keep, other = level[i], level[i + 1]
            keep[1].add_(other[1])
            arena.restore(other[0])
            nxt.append(keep)
        level = nxt
    if not level:
        return None
    slab, total = level[0]
    result = total.clone()
    arena.restore(slab)
    return result
