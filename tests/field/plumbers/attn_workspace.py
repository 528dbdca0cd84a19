"""Workspaces for split-KV attention and the metadata built on top of them."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional

try:
    import torch
except ImportError:
    torch = None


def _empty(n: int):
    return torch.empty(n) if torch is not None else [0.0] * n


class Workspace:
    def __init__(self, size: int) -> None:
        self.size = size
        self.tensor = _empty(size)


class WorkspacePool:
    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._stack = [Workspace(size) for _ in range(count)]
        self.high_water = 0
        self.count = count

    def grab(self, size: int) -> Optional[Workspace]:
        if size > self.size or not self._stack:
            return None
        ws = self._stack.pop()
        self.high_water = max(self.high_water, self.count - len(self._stack))
        return ws

    def ungrab(self, ws: Workspace) -> None:
        self._stack.append(ws)


_default_pool = WorkspacePool(1 << 16, 4)
# shared by all layers that run without a plan
_GLOBAL_WS = _default_pool.grab(1 << 16)  # clean: process-lifetime


@dataclass
class AttnMeta:
    seq_lens: List[int]
    splits: int
    workspace: Optional[Workspace] = None
    owns_workspace: bool = False


class SplitKVBackend:
    def __init__(self, pool: WorkspacePool, heads: int) -> None:
        self.pool = pool
        self.heads = heads
        self.plans: Dict[int, AttnMeta] = {}
        self.graph_plans: Dict[int, AttnMeta] = {}

    def build(self, seq_lens: List[int], shared: Optional[Workspace] = None) -> Optional[AttnMeta]:
        meta = AttnMeta(seq_lens, splits=max(1, max(seq_lens) // 256))
        if meta.splits == 1:
            return meta
        if shared is not None:
            meta.workspace = shared
            return meta
        ws = self.pool.grab(meta.splits * self.heads * len(seq_lens))  # clean: near miss, in the metadata, whose flag tells retire to give it back
        if ws is None:
            return None
        meta.workspace, meta.owns_workspace = ws, True
        return meta

    def build_cascade(self, seq_lens: List[int], common: int) -> Optional[AttnMeta]:
        """Metadata for the suffix pass of cascade attention."""
        meta = AttnMeta([n - common for n in seq_lens], splits=2)
        meta.workspace = self.pool.grab(2 * self.heads * len(seq_lens))  # leak: the flag is set for a nonzero common prefix only
        if meta.workspace is None:
            return None
        if common > 0:
            meta.owns_workspace = True
        return meta

    def retire(self, meta: AttnMeta) -> None:
        if meta.owns_workspace and meta.workspace is not None:
            self.pool.ungrab(meta.workspace)
        meta.workspace, meta.owns_workspace = None, False

    def plan(self, key: int, seq_lens: List[int]) -> bool:
        meta = self.build(seq_lens)  # leak: planning a key again overwrites its metadata
        if meta is None:
            return False
        self.plans[key] = meta
        return True

    def plan_graph(self, key: int, seq_lens: List[int]) -> bool:
        meta = self.build(seq_lens)  # clean: near miss, the earlier metadata is retired
        if meta is None:
            return False
        old = self.graph_plans.pop(key, None)
        if old is not None:
            self.retire(old)
        self.graph_plans[key] = meta
        return True

    def end_plans(self) -> None:
        for table in (self.plans, self.graph_plans):
            while table:
                _, meta = table.popitem()
                self.retire(meta)

    def forward(self, seq_lens: List[int], shared: Optional[Workspace] = None) -> float:
        meta = self.build(seq_lens, shared)  # clean: retired after use
        if meta is None:
            return 0.0
        out = float(sum(meta.seq_lens)) / meta.splits
        self.retire(meta)
        return out

    def forward_cascade(self, seq_lens: List[int], common: int) -> float:
        meta = self.build_cascade(seq_lens, common)  # clean: retired, the flag is at fault in build_cascade
        if meta is None:
            return self.forward(seq_lens)
        out = float(sum(meta.seq_lens)) / meta.splits
        self.retire(meta)
        return out

    def _partial(self, chunk: List[int], out: Optional[Workspace]) -> Workspace:
        """Writes to `out`, or to a fresh workspace which is then the caller's."""
        if out is None:
            out = self.pool.grab(self.heads * len(chunk))  # clean: returned to the caller
            if out is None:
                raise MemoryError("split-kv workspace")
        out.tensor[0] = float(sum(chunk))
        return out

    def merge(self, chunks: List[List[int]]) -> float:
        acc: Optional[Workspace] = None
        total = 0.0
        for chunk in chunks:
            acc = self._partial(chunk, acc)  # clean: near miss, only the first turn takes one, given back after the loop
            total += float(acc.tensor[0])
        if acc is not None:
            self.pool.ungrab(acc)
        return total

    def merge_pairwise(self, chunks: List[List[int]]) -> float:
        total = 0.0
        for chunk in chunks:
            left = self._partial(chunk[::2], None)  # clean: given back in the loop
            right = self._partial(chunk[1::2], None)  # leak: for a single-token chunk the continue gives back only the left
            if len(chunk) == 1:
                total += float(left.tensor[0])
                self.pool.ungrab(left)
                continue
            total += float(left.tensor[0]) + float(right.tensor[0])
            self.pool.ungrab(right)
            self.pool.ungrab(left)
        return total

    def chunks_of(self, seq_lens: List[int], step: int) -> Iterator[float]:
        ws = self.pool.grab(step)  # leak: longest stops this generator before its last line
        if ws is None:
            return
        for i in range(0, len(seq_lens), step):
            ws.tensor[0] = float(max(seq_lens[i:i + step]))
            yield float(ws.tensor[0])
        self.pool.ungrab(ws)

    def longest(self, seq_lens: List[int], cap: float) -> float:
        best = 0.0
        for value in self.chunks_of(seq_lens, 8):
            best = max(best, value)
            if best >= cap:
                return cap
        return best
