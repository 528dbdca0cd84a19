"""1F1B pipeline stage with pooled receive buffers."""
from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, List, Optional

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    WARMUP = 0
    STEADY = 1
    COOLDOWN = 2


@dataclass
class StageSpec:
    stage_id: int
    n_stages: int
    micro_shape: tuple
    n_recv: int = 4

    @property
    def is_first(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last(self) -> bool:
        return self.stage_id == self.n_stages - 1


class RecvBuffers:
    def __init__(self, spec: StageSpec) -> None:
        self._all = [torch.empty(spec.micro_shape) for _ in range(spec.n_recv)]
        self._free: Deque[torch.Tensor] = deque(self._all)

    def claim(self) -> torch.Tensor:
        if not self._free:
            raise RuntimeError("receive buffers exhausted")
        return self._free.popleft()

    def unclaim(self, t: torch.Tensor) -> None:
        self._free.append(t)


class PipelineStage:
    def __init__(self, spec: StageSpec, module: torch.nn.Module) -> None:
        self.spec = spec
        self.module = module
        self.recv = RecvBuffers(spec)
        self.waiting: Deque[torch.Tensor] = deque()
        self.inputs: Dict[int, torch.Tensor] = {}
        self._peeked: Optional[torch.Tensor] = None

    def _recv_forward(self) -> torch.Tensor:
        buf = self.recv.claim()  # clean: returned to the caller
        dist.recv(buf, src=self.spec.stage_id - 1)
        return buf

    def forward_micro(self, micro: int, phase: Phase) -> Optional[torch.Tensor]:
        if self.spec.is_first:
            x = torch.zeros(self.spec.micro_shape)
        else:
            x = self._recv_forward()  # clean: near miss, parked per micro batch and unclaimed by backward_micro
            self.inputs[micro] = x
        y = self.module(x)
        if phase is Phase.WARMUP:
            return None
        return y

    def backward_micro(self, micro: int, grad: torch.Tensor) -> None:
        x = self.inputs.pop(micro, None)
        if x is None:
            return
        self.module(x).backward(grad)
        self.recv.unclaim(x)

    def forward_only(self, n_micro: int) -> List[torch.Tensor]:
        outs = []
        for _ in range(n_micro):
            x = self._recv_forward()  # clean: unclaimed each round
            outs.append(self.module(x).detach().clone())
            self.recv.unclaim(x)
        return outs

    def forward_until_eos(self, eos: float) -> List[torch.Tensor]:
        outs = []
        while True:
            x = self._recv_forward()  # leak: the end marker's buffer leaves the loop with break
            if float(x.flatten()[0]) == eos:
                break
            outs.append(self.module(x).detach().clone())
            self.recv.unclaim(x)
        return outs

    def forward_until_eos_v2(self, eos: float) -> List[torch.Tensor]:
        outs = []
        while True:
            x = self._recv_forward()  # clean: near miss, break but the line after the loop unclaims it
            if float(x.flatten()[0]) == eos:
                break
            outs.append(self.module(x).detach().clone())
            self.recv.unclaim(x)
        self.recv.unclaim(x)
        return outs

    def forward_scaled(self, scale: float) -> torch.Tensor:
        x = self._recv_forward()  # leak: rebound by the multiplication, the product is unclaimed instead
        x = x * scale
        y = self.module(x)
        self.recv.unclaim(x)
        return y

    def forward_scaled_(self, scale: float) -> torch.Tensor:
        x = self._recv_forward()  # clean: near miss, mul_ works in place
        x.mul_(scale)
        y = self.module(x)
        self.recv.unclaim(x)
        return y

    def peek(self) -> torch.Tensor:
        self._peeked = self._recv_forward()  # leak: a second peek overwrites the first, nothing checks for it
        return self._peeked

    def consume_peeked(self) -> Optional[torch.Tensor]:
        x, self._peeked = self._peeked, None
        if x is None:
            return None
        y = self.module(x)
        self.recv.unclaim(x)
        return y

    def enqueue(self) -> None:
        self.waiting.append(self.recv.claim())  # clean: dequeue_all unclaims what waits

    def dequeue_all(self) -> int:
        n = 0
        while self.waiting:
            self.recv.unclaim(self.waiting.popleft())
            n += 1
        return n


def inspect_inputs(stage: PipelineStage, threshold: float) -> bool:
    seen = False
    for _ in range(stage.spec.n_recv):
        head = stage.peek()
        if float(head.abs().max()) > threshold:
            seen = True
    stage.consume_peeked()
    return seen


def drive(stage: PipelineStage, n_micro: int) -> None:
    warm = min(n_micro, stage.spec.n_stages - stage.spec.stage_id)
    for m in range(warm):
        stage.forward_micro(m, Phase.WARMUP)
    for m in range(warm, n_micro):
        y = stage.forward_micro(m, Phase.STEADY)
        stage.backward_micro(m - warm, torch.ones_like(y))
    for m in range(n_micro - warm, n_micro):
        stage.backward_micro(m, torch.ones(stage.spec.micro_shape))
