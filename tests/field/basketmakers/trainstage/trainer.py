"""Layer-wise forward with gathered parameters."""
from __future__ import annotations

from typing import Optional

import torch

from .codec import to_wire
from .collect import GatherHandle, gather_async
from .staging import STAGE


class ShardTrainer:
    def __init__(self, shards: list[torch.Tensor], world: int, master: bool = True):
        self.shards = shards
        self.world = world
        self.master = master
        self.ahead: dict[int, GatherHandle] = {}
        self._master_buf: Optional[torch.Tensor] = None

    def prefetch(self, i: int) -> None:
        if i < len(self.shards) and i not in self.ahead:
            self.ahead[i] = gather_async(self.shards[i], self.world)  # clean: popped and freed by layer() or drop()

    def layer(self, i: int, x: torch.Tensor) -> torch.Tensor:
        self.prefetch(i)
        self.prefetch(i + 1)
        h = self.ahead.pop(i)
        w = h.wait().view(x.shape[-1], -1)
        y = x @ w
        h.free()
        return y

    def drop(self) -> None:
        for h in self.ahead.values():
            h.free()
        self.ahead.clear()

    def norm(self, i: int, skip_frozen: bool) -> float:
        h = gather_async(self.shards[i], self.world)  # leak: the frozen shard returns without free()
        full = h.wait()
        if skip_frozen and not self.shards[i].requires_grad:
            return 0.0
        out = float(full.norm())
        h.free()
        return out

    def open_step(self, n: int) -> None:
        if self.master:
            self._master_buf = STAGE.pull((n,), torch.float32)  # clean: near miss, close_step() racks it under the same flag

    def close_step(self) -> None:
        if self.master:
            STAGE.rack(self._master_buf)
            self._master_buf = None

    def wire_bytes(self) -> int:
        total = 0
        for s in self.shards:
            wire = to_wire(s)  # clean: racked on each turn
            total += wire.nbytes
            STAGE.rack(wire)
        return total

    def export(self, sink) -> int:
        sent = 0
        for s in self.shards:
            wire = to_wire(s)  # leak: a shard that the sink does not want is skipped with its tensor
            if not sink.wants(s.shape):
                continue
            sink.write(wire.cpu())
            STAGE.rack(wire)
            sent += 1
        return sent
