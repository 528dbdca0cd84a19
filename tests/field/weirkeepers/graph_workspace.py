"""Static buffers for captured decode graphs, and the runner that replays them."""
from __future__ import annotations

import bisect
import logging
from collections import defaultdict
from typing import Dict, List, Optional, Sequence, Tuple

import torch

log = logging.getLogger(__name__)

_DTYPES = {"half": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class WorkspacePool:
    """Tensors by (rows, cols, dtype); a tensor out of the pool must come back by put()."""

    def __init__(self, device: str, cap_bytes: int) -> None:
        self.device = device
        self.cap = cap_bytes
        self.out_bytes = 0
        self._shelves: Dict[Tuple[int, int, str], List[torch.Tensor]] = defaultdict(list)
        self._keys: Dict[int, Tuple[int, int, str]] = {}

    def get(self, rows: int, cols: int, dtype: str = "half") -> torch.Tensor:
        key = (rows, cols, dtype)
        shelf = self._shelves[key]
        tensor = shelf.pop() if shelf else torch.empty(rows, cols, dtype=_DTYPES[dtype], device=self.device)
        self._keys[id(tensor)] = key
        self.out_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def get_or_none(self, rows: int, cols: int) -> Optional[torch.Tensor]:
        if self.out_bytes + 2 * rows * cols > self.cap:
            return None
        return self.get(rows, cols)  # clean: handed to the caller

    def zeros(self, rows: int, cols: int, dtype: str = "half") -> torch.Tensor:
        tensor = self.get(rows, cols, dtype)  # clean: handed to the caller
        tensor.zero_()
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        self.out_bytes -= tensor.numel() * tensor.element_size()
        self._shelves[self._keys.pop(id(tensor))].append(tensor)


class AttentionPlan:
    """Per-batch metadata; release() gives its tensors back."""

    def __init__(self, pool: WorkspacePool, batch: int, max_pages: int) -> None:
        self.pool = pool
        self.batch = batch
        self.table = pool.zeros(batch, max_pages, "fp32")  # clean: release puts it
        self.lengths = pool.zeros(batch, 1, "fp32")  # leak: release puts only table and splits
        self.splits = pool.get(batch, 8, "fp32")  # clean: release puts it

    def release(self) -> None:
        self.pool.put(self.table)
        self.pool.put(self.splits)
        self.batch = 0


class Capture:
    def __init__(self, pool: WorkspacePool, size: int, hidden: int) -> None:
        self.size = size
        self.pool = pool
        self.inputs = pool.zeros(size, hidden)  # clean: destroy puts it
        self.outputs = pool.zeros(size, hidden)  # clean: destroy puts it
        self.replays = 0

    def replay(self, batch: torch.Tensor) -> torch.Tensor:
        self.inputs[: batch.shape[0]].copy_(batch)
        self.replays += 1
        return self.outputs[: batch.shape[0]]

    def destroy(self) -> None:
        for tensor in (self.inputs, self.outputs):
            self.pool.put(tensor)


class GraphRunner:
    def __init__(self, pool: WorkspacePool, hidden: int, sizes: Sequence[int]) -> None:
        self.pool = pool
        self.hidden = hidden
        self.sizes = sorted(sizes)
        self.captures: Dict[int, Capture] = {}

    def capture_all(self) -> int:
        for size in reversed(self.sizes):
            if size in self.captures:
                continue
            self.captures[size] = Capture(self.pool, size, self.hidden)  # clean: reset destroys every capture
        return len(self.captures)

    def recapture(self, size: int) -> bool:
        fresh = Capture(self.pool, size, self.hidden)  # leak: dropped when the present one is unused
        old = self.captures.get(size)
        if old is not None:
            if old.replays == 0:
                log.info("batch size %d keeps its capture", size)
                return False
            old.destroy()
        self.captures[size] = fresh
        return True

    def reset(self) -> None:
        for capture in self.captures.values():
            capture.destroy()
        self.captures.clear()

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        at = bisect.bisect_left(self.sizes, batch.shape[0])
        if at < len(self.sizes) and self.sizes[at] in self.captures:
            return self.captures[self.sizes[at]].replay(batch)
        return batch

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        out = self.pool.get(x.shape[0], x.shape[1])  # clean: handed to the caller
        torch.mul(x, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), out=out)
        return out

    def _gathered(self, parts: List[torch.Tensor]) -> torch.Tensor:
        rows = sum(p.shape[0] for p in parts)
        out = self.pool.get(rows, self.hidden)  # clean: handed to the caller
        at = 0
        for part in parts:
            out[at:at + part.shape[0]].copy_(part)
            at += part.shape[0]
        return out

    def pooled_embedding(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._norm(x)  # leak: its mean is a copy, the pooled tensor is dropped
        return normed.mean(dim=0).clone()

    def hidden_to_host(self, parts: List[torch.Tensor]) -> torch.Tensor:
        return self._gathered(parts).to("cpu", torch.float32)  # leak: the copy is returned, this is lost

    def mlp(self, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        normed = self._norm(x)  # clean: put before the return
        mid = self.pool.get(x.shape[0], up.shape[1])  # clean: put before the return
        out = self.pool.get(x.shape[0], down.shape[1])  # clean: handed to the caller
        torch.matmul(normed, up, out=mid)
        torch.matmul(mid, down, out=out)
        self.pool.put(mid)
        self.pool.put(normed)
        return out

    def stack(self, x: torch.Tensor, layers: List[Tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        h = self._norm(x)  # leak: rebound by the first layer's result
        for up, down in layers:
            h = self.mlp(h, up, down)  # leak: rebound by the following layer's result
        return h

    def stack_inplace(self, x: torch.Tensor, layers: List[Tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        h = self._norm(x)  # clean: near miss, put when replaced, or returned
        for up, down in layers:
            nxt = self.mlp(h, up, down)  # clean: near miss, becomes h, which is put next turn or returned
            self.pool.put(h)
            h = nxt
        return h

    def attend(self, q: torch.Tensor, pages: int) -> Optional[torch.Tensor]:
        plan = AttentionPlan(self.pool, q.shape[0], pages)  # clean: released before each return
        out = self.pool.get_or_none(q.shape[0], self.hidden)  # clean: handed to the caller
        if out is None:
            plan.release()
            return None
        out.copy_(q)
        plan.release()
        return out

    def dry_attend(self, q: torch.Tensor, pages: int) -> int:
        plan = AttentionPlan(self.pool, q.shape[0], pages)  # leak: return 0 for a wide table without release
        if plan.table.shape[1] > 4096:
            return 0
        rows = plan.splits.shape[0]
        plan.release()
        return rows
