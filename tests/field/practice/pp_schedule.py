"""1F1B and interleaved schedules. Activations travel in preallocated stage buffers."""
import collections
import dataclasses
import logging
from typing import Callable, Deque, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class StageConfig:
    stage: int
    num_stages: int
    num_microbatches: int
    act_shape: tuple
    dtype: torch.dtype = torch.bfloat16
    drop_nonfinite: bool = False

    @property
    def is_first(self):
        return self.stage == 0

    @property
    def is_last(self):
        return self.stage == self.num_stages - 1


class ActivationRing:
    def __init__(self, cfg: StageConfig, depth: int):
        self._bufs: Deque[torch.Tensor] = collections.deque(
            torch.empty(cfg.act_shape, dtype=cfg.dtype) for _ in range(depth))

    def rent(self) -> torch.Tensor:
        if not self._bufs:
            raise RuntimeError("activation ring is empty")
        return self._bufs.popleft()

    def give_back(self, buf: torch.Tensor) -> None:
        self._bufs.append(buf)


class P2P:
    def __init__(self, ring: ActivationRing, cfg: StageConfig):
        self.ring = ring
        self.cfg = cfg

    def recv_forward(self) -> Optional[torch.Tensor]:
        if self.cfg.is_first:
            return None
        buf = self.ring.rent()  # clean: handed to the caller
        torch.distributed.recv(buf, src=self.cfg.stage - 1)
        return buf

    def recv_backward(self) -> Optional[torch.Tensor]:
        if self.cfg.is_last:
            return None
        buf = self.ring.rent()  # clean: handed to the caller
        torch.distributed.recv(buf, src=self.cfg.stage + 1)
        return buf

    def send(self, t: torch.Tensor, dst: int) -> None:
        torch.distributed.send(t.contiguous(), dst=dst)


class OneFOneB:
    def __init__(self, cfg: StageConfig, fwd: Callable, bwd: Callable):
        self.cfg = cfg
        self.ring = ActivationRing(cfg, cfg.num_stages + 1)
        self.p2p = P2P(self.ring, cfg)
        self.fwd, self.bwd = fwd, bwd
        self.inflight: Deque[Optional[torch.Tensor]] = collections.deque()

    def _forward(self) -> None:
        inp = self.p2p.recv_forward()  # clean: queued, _backward() takes it from the queue and gives it back
        out = self.fwd(inp)
        if not self.cfg.is_last:
            self.p2p.send(out, self.cfg.stage + 1)
        self.inflight.append(inp)

    def _backward(self) -> None:
        grad = self.p2p.recv_backward()  # clean: near miss, given back under the same None check
        inp = self.inflight.popleft()
        gin = self.bwd(inp, grad)
        if grad is not None:
            self.ring.give_back(grad)
        if inp is not None:
            self.p2p.send(gin, self.cfg.stage - 1)
            self.ring.give_back(inp)

    def step(self) -> None:
        warm = min(self.cfg.num_stages - self.cfg.stage - 1, self.cfg.num_microbatches)
        for _ in range(warm):
            self._forward()
        for _ in range(self.cfg.num_microbatches - warm):
            self._forward()
            self._backward()
        while self.inflight:
            self._backward()

    def evaluate(self, n: int) -> List[torch.Tensor]:
        losses = []
        for i in range(n):
            inp = self.p2p.recv_forward()  # leak: non-finite micro batches are skipped without give_back
            out = self.fwd(inp)
            if self.cfg.drop_nonfinite and not torch.isfinite(out).all():
                logger.warning("microbatch %d dropped", i)
                continue
            losses.append(out.detach())
            if inp is not None:
                self.ring.give_back(inp)
        return losses

    def flush_grad(self) -> float:
        grad = self.p2p.recv_backward()  # leak: only its norm is used
        return 0.0 if grad is None else float(grad.norm())


class Interleaved(OneFOneB):
    def __init__(self, cfg, fwd, bwd, chunks: int):
        super().__init__(cfg, fwd, bwd)
        self.chunks = chunks
        self.saved: Dict[int, List[torch.Tensor]] = {c: [] for c in range(chunks)}

    def forward_chunk(self, c: int) -> torch.Tensor:
        x = self.ring.rent()  # clean: saved per chunk, drain() gives all of them back
        x.normal_()
        self.saved[c].append(x)
        return self.fwd(x)

    def drain(self) -> None:
        for bufs in self.saved.values():
            while bufs:
                self.ring.give_back(bufs.pop())

    def recompute(self, c: int, times: int) -> Optional[torch.Tensor]:
        x = None
        for _ in range(times):
            x = self.ring.rent()  # leak: each turn overwrites the buffer of the turn before
            x.copy_(self.saved[c][-1])
            self.fwd(x)
        if x is not None:
            out = x.clone()
            self.ring.give_back(x)
            return out
        return None

    def stage_loss(self, target: torch.Tensor) -> torch.Tensor:
        x = self.ring.rent()  # clean: near miss, the view shares storage but x itself goes back
        flat = x.view(-1)
        flat.copy_(target.reshape(-1))
        loss = self.fwd(x).sum()
        self.ring.give_back(x)
        return loss

    def swap(self, c: int) -> None:
        fresh = self.ring.rent()  # clean: near miss, exchanged with the saved one, which goes back
        old, self.saved[c][-1] = self.saved[c][-1], fresh
        self.ring.give_back(old)
