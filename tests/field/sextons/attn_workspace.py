from __future__ import annotations

import math
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Sequence

import torch


@dataclass(eq=False)
class Workspace:
    index: int
    nbytes: int
    storage: torch.Tensor

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        n = math.prod(shape) * dtype.itemsize
        return self.storage[:n].view(dtype).view(*shape)


class WorkspaceArena:
    """Size-classed scratch buffers shared by the decode kernels."""

    def __init__(self, classes: dict[int, int], device: str = "cuda") -> None:
        self._lock = threading.Lock()
        self._free: dict[int, deque[Workspace]] = {}
        index = 0
        for nbytes in sorted(classes):
            q: deque[Workspace] = deque()
            for _ in range(classes[nbytes]):
                q.append(Workspace(index, nbytes, torch.empty(nbytes, dtype=torch.uint8, device=device)))
                index += 1
            self._free[nbytes] = q

    def take(self, nbytes: int) -> Workspace | None:
        with self._lock:
            for size, q in self._free.items():
                if size >= nbytes and q:
                    return q.popleft()
        return None

    def give(self, ws: Workspace) -> None:
        with self._lock:
            self._free[ws.nbytes].append(ws)

    def take_pair(self, first: int, second: int) -> tuple[Workspace, Workspace] | None:
        a = self.take(first)  # clean: rolled back when the second is missing, else returned
        if a is None:
            return None
        b = self.take(second)  # clean: returned in the pair
        if b is None:
            self.give(a)
            return None
        return a, b

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[Workspace | None]:
        ws = self.take(nbytes)  # clean: given back in the finally
        try:
            yield ws
        finally:
            if ws is not None:
                self.give(ws)


@dataclass
class DecodePlan:
    num_splits: int
    batch: int
    heads: int
    head_dim: int
    partial: Workspace | None = None
    lse: Workspace | None = None
    block_table: Workspace | None = None

    @property
    def partial_bytes(self) -> int:
        return 4 * self.num_splits * self.batch * self.heads * self.head_dim

    @property
    def lse_bytes(self) -> int:
        return 4 * self.num_splits * self.batch * self.heads


@dataclass
class SplitKVDecoder:
    arena: WorkspaceArena
    heads: int
    head_dim: int
    sm_count: int = 108
    _plan: DecodePlan | None = field(default=None, init=False)

    def _splits(self, batch: int, max_len: int) -> int:
        tiles = max(1, math.ceil(max_len / 256))
        return max(1, min(tiles, self.sm_count // max(1, batch * self.heads)))

    def plan(self, batch: int, max_len: int) -> bool:
        if self._plan is not None:
            self._drop(self._plan)
            self._plan = None
        plan = DecodePlan(self._splits(batch, max_len), batch, self.heads, self.head_dim)
        if plan.num_splits > 1:
            pair = self.arena.take_pair(plan.partial_bytes, plan.lse_bytes)  # leak: lost when the block table below cannot be had
            if pair is None:
                return False
            plan.partial, plan.lse = pair
        table = self.arena.take(4 * batch * math.ceil(max_len / 16))  # clean: kept in the plan, dropped by _drop
        if table is None:
            return False
        plan.block_table = table
        self._plan = plan
        return True

    def _drop(self, plan: DecodePlan) -> None:
        for ws in (plan.partial, plan.lse, plan.block_table):
            if ws is not None:
                self.arena.give(ws)
        plan.partial = plan.lse = plan.block_table = None

    def close(self) -> None:
        if self._plan is not None:
            self._drop(self._plan)
            self._plan = None

    def run(self, q: torch.Tensor, kv_len: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        assert plan is not None
        out = torch.empty_like(q)
        counters = self.arena.take(4 * plan.batch)  # leak: the single-split return skips the give
        if counters is None:
            return out
        counters.storage.zero_()
        if plan.num_splits == 1:
            torch.ops.splitkv.decode(q, kv_len, out, counters.storage)
            return out
        torch.ops.splitkv.decode_partial(q, kv_len, plan.partial.storage, plan.lse.storage, counters.storage)
        torch.ops.splitkv.combine(plan.partial.storage, plan.lse.storage, out)
        self.arena.give(counters)
        return out

    def autotune(self, q: torch.Tensor, kv_len: torch.Tensor, candidates: Sequence[int]) -> int:
        best, best_ms = candidates[0], float("inf")
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for splits in candidates:
            need = 4 * splits * q.numel()
            ws = self.arena.take(need)  # clean: near miss, the except path continues but the finally gives it back
            if ws is None:
                continue
            try:
                start.record()
                torch.ops.splitkv.decode_partial(q, kv_len, ws.storage, None, None)
                end.record()
                end.synchronize()
            except RuntimeError:
                continue
            finally:
                self.arena.give(ws)
            ms = start.elapsed_time(end)
            if ms < best_ms:
                best, best_ms = splits, ms
        return best


def prefill_lengths(arena: WorkspaceArena, lengths: Sequence[int]) -> torch.Tensor | None:
    ws = arena.take(8 * len(lengths))  # clean: near miss, what is returned is a clone, the buffer goes back
    if ws is None:
        return None
    view = ws.view((len(lengths),), torch.int64)
    view.copy_(torch.tensor(list(lengths)))
    result = view.cumsum(0).clone()
    arena.give(ws)
    return result


def merge_states(arena: WorkspaceArena, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor | None:
    acc = arena.take(4 * outs[0].numel())  # clean: given back on both ways out
    if acc is None:
        return None
    for out, lse in zip(outs, lses):
        tmp = arena.take(4 * out.numel())  # leak: the empty-shard continue loses it
        if tmp is None:
            arena.give(acc)
            return None
        if not torch.isfinite(lse).any():
            continue
        torch.ops.splitkv.merge(acc.storage, out, lse, tmp.storage)
        arena.give(tmp)
    merged = acc.view(outs[0].shape, torch.float32).clone()
    arena.give(acc)
    return merged


def warmup(arena: WorkspaceArena, shapes: Sequence[int]) -> int:
    done = 0
    ws = None
    for nbytes in shapes:
        ws = arena.take(nbytes)  # leak: each turn overwrites the one before, only the last is given back
        if ws is None:
            break
        ws.storage.zero_()
        done += 1
    if ws is not None:
        arena.give(ws)
    return done
