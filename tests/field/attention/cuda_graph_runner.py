"""Captured decode graphs with static input buffers."""
from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class StaticInputs:
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


class StaticBufferArena:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spare: Dict[int, List[StaticInputs]] = {}
        self.live = 0

    def obtain(self, bs: int) -> StaticInputs:
        self.live += 1
        spare = self._spare.get(bs)
        if spare:
            return spare.pop()
        mk = lambda: torch.zeros(bs, dtype=torch.long, device=self.device)
        return StaticInputs(mk(), mk(), mk())

    def recycle(self, bs: int, inputs: StaticInputs) -> None:
        self.live -= 1
        self._spare.setdefault(bs, []).append(inputs)


class GraphEntry:
    def __init__(self, bs: int, inputs: StaticInputs, replay: Callable[[], torch.Tensor]) -> None:
        self.bs = bs
        self.inputs = inputs
        self.replay = replay


class CudaGraphRunner:
    def __init__(self, model: Callable[..., torch.Tensor], arena: StaticBufferArena, sizes: List[int]) -> None:
        self.model = model
        self.arena = arena
        self.sizes = sorted(sizes)
        self.graphs: Dict[int, GraphEntry] = {}
        self.current: Optional[StaticInputs] = None
        self.current_bs = 0

    def _record(self, bs: int, inp: StaticInputs) -> Optional[Callable[[], torch.Tensor]]:
        if not torch.cuda.is_available():
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.model(inp.input_ids, inp.positions, inp.slot_mapping)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def capture(self, bs: int) -> bool:
        inputs = self.arena.obtain(bs)  # leak: an unsupported capture returns without recycling
        replay = self._record(bs, inputs)
        if replay is None:
            logger.info("graph capture unavailable for bs=%d", bs)
            return False
        old = self.graphs.pop(bs, None)
        if old is not None:
            self.arena.recycle(bs, old.inputs)
        self.graphs[bs] = GraphEntry(bs, inputs, replay)
        return True

    def capture_all(self) -> int:
        n = 0
        for bs in reversed(self.sizes):
            if bs in self.graphs:
                continue
            inputs = self.arena.obtain(bs)  # clean: near miss, goes into the graph table or back to the arena
            replay = self._record(bs, inputs)
            if replay is not None:
                self.graphs[bs] = GraphEntry(bs, inputs, replay)
                n += 1
            else:
                self.arena.recycle(bs, inputs)
        return n

    def bucket(self, n: int) -> Optional[int]:
        i = bisect.bisect_left(self.sizes, n)
        return self.sizes[i] if i < len(self.sizes) else None

    def run(self, ids: torch.Tensor, pos: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        n = ids.shape[0]
        bs = self.bucket(n)
        entry = self.graphs.get(bs) if bs else None
        if entry is None:
            return self.model(ids, pos, slots)
        entry.inputs.input_ids[:n].copy_(ids)
        entry.inputs.positions[:n].copy_(pos)
        entry.inputs.slot_mapping[:n].copy_(slots)
        return entry.replay()[:n]

    def eager_padded(self, ids: torch.Tensor, pos: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        bs = self.bucket(ids.shape[0])
        inp = self.arena.obtain(bs) if bs is not None else None  # clean: near miss, recycled under the same condition
        if inp is not None:
            inp.input_ids[: ids.shape[0]].copy_(ids)
            out = self.model(inp.input_ids, inp.positions, inp.slot_mapping)[: ids.shape[0]]
        else:
            out = self.model(ids, pos, slots)
        if inp is not None:
            self.arena.recycle(bs, inp)
        return out

    def prepare(self, bs: int) -> StaticInputs:
        self.current = self.arena.obtain(bs)  # leak: a second prepare overwrites inputs still held
        self.current_bs = bs
        return self.current

    def finish(self) -> None:
        if self.current is not None:
            self.arena.recycle(self.current_bs, self.current)
            self.current = None

    def run_buckets(self, sizes: List[int]) -> List[torch.Tensor]:
        outs = []
        for bs in sizes:
            inp = self.prepare(bs)  # leak: only the inputs of the last round are recycled by finish
            outs.append(self.model(inp.input_ids, inp.positions, inp.slot_mapping).clone())
        self.finish()
        return outs

    def profile(self, bs: int, iters: int) -> float:
        inp = self.arena.obtain(bs)  # clean: recycled after the loop, also after the break
        total = 0.0
        for _ in range(iters):
            out = self.model(inp.input_ids, inp.positions, inp.slot_mapping)
            total += float(out.float().mean())
            if total != total:
                break
        self.arena.recycle(bs, inp)
        return total

    def warmup(self, bs: int) -> None:
        inp = self.arena.obtain(bs)  # leak: fields are used and the holder forgotten
        self.model(inp.input_ids, inp.positions, inp.slot_mapping)
        torch.cuda.synchronize() if torch.cuda.is_available() else None

    def shutdown(self) -> None:
        self.finish()
        for bs, e in self.graphs.items():
            self.arena.recycle(bs, e.inputs)
        self.graphs.clear()
