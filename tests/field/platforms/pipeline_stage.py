"""One stage of a 1F1B pipeline schedule with pooled activation buffers."""
from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Tuple

import torch


class ActivationPool:
    """Bounded set of equally shaped activation buffers."""

    def __init__(self, shape: Tuple[int, ...], count: int) -> None:
        self._ready: "queue.SimpleQueue[torch.Tensor]" = queue.SimpleQueue()
        for _ in range(count):
            self._ready.put(torch.empty(shape))

    def checkout(self) -> torch.Tensor:
        return self._ready.get()  # clean: returned to the caller

    def try_checkout(self) -> Optional[torch.Tensor]:
        try:
            return self._ready.get_nowait()  # clean: returned to the caller
        except queue.Empty:
            return None

    def checkin(self, buffer: torch.Tensor) -> None:
        self._ready.put(buffer)


@dataclass
class MicroBatch:
    index: int
    data: torch.Tensor
    last: bool = False


class Transport:
    """Moves tensors to and from the neighbouring stages on a worker thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._executor = ThreadPoolExecutor(max_workers=2)

    def isend(self, tensor: torch.Tensor, dst: int) -> "Future[None]":
        return self._executor.submit(torch.distributed.send, tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        torch.distributed.recv(tensor, src)

    def shutdown(self) -> None:
        self._executor.shutdown(wait=True)


class PipelineStage:
    def __init__(self, module: torch.nn.Module, pool: ActivationPool, link: Transport, last: bool) -> None:
        self.module = module
        self.pool = pool
        self.link = link
        self.last = last
        self._inputs: Deque[torch.Tensor] = deque()
        self._outputs: Dict[int, torch.Tensor] = {}
        self._sends: List["Future[None]"] = []

    def recv_forward(self) -> torch.Tensor:
        buffer = self.pool.checkout()  # clean: returned to the caller
        self.link.recv(buffer, self.link.rank - 1)
        return buffer

    def forward(self, micro: MicroBatch) -> None:
        source = self.recv_forward()  # clean: queued on _inputs, backward checks it in
        self._inputs.append(source)
        result = self.module(source)
        if self.last:
            return
        staged = self.pool.checkout()  # clean: near miss, checked in by the completion callback of the send
        staged.copy_(result)
        sent = self.link.isend(staged, self.link.rank + 1)
        sent.add_done_callback(lambda _f, b=staged: self.pool.checkin(b))

    def forward_keep(self, micro: MicroBatch) -> torch.Tensor:
        """Forward for recomputation: keeps a copy of the output under the micro index."""
        kept = self.pool.checkout()  # leak: drain forgets _outputs and nothing else empties it
        kept.copy_(self.module(micro.data))
        self._outputs[micro.index] = kept
        return kept.detach()

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        source = self._inputs.popleft()
        self.module(source).backward(grad)
        result = torch.zeros_like(source) if source.grad is None else source.grad.clone()
        self.pool.checkin(source)
        return result

    def send_grad(self, grad: torch.Tensor, overlap: bool) -> None:
        buffer = self.pool.checkout()  # leak: the overlapped branch has no callback to check it in
        buffer.copy_(grad)
        if overlap:
            self._sends.append(self.link.isend(buffer, self.link.rank - 1))
        else:
            self.link.isend(buffer, self.link.rank - 1).result()
            self.pool.checkin(buffer)

    def drain(self) -> None:
        while self._inputs:
            self.pool.checkin(self._inputs.popleft())
        for work in self._sends:
            work.result()
        self._sends.clear()


class Interleaver:
    """Runs warm-up, steady and cool-down phases over a list of micro batches."""

    def __init__(self, stage: PipelineStage, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.stage = stage
        self.loss = loss

    def evaluate(self, micros: List[MicroBatch], skip_padding: bool) -> float:
        total = 0.0
        for micro in micros:
            hidden = self.stage.recv_forward()  # leak: continue on a padded micro batch skips the checkin
            if skip_padding and not micro.data.any():
                continue
            total += float(self.loss(self.stage.module(hidden)))
            self.stage.pool.checkin(hidden)
        return total

    def replay(self, micros: List[MicroBatch]) -> List[torch.Tensor]:
        held = {micro.index: self.stage.recv_forward() for micro in micros}  # leak: the buffer of the last micro batch stays in the dict
        outputs: List[torch.Tensor] = []
        for micro in micros:
            outputs.append(self.stage.module(held[micro.index]).detach())
            if not micro.last:
                self.stage.pool.checkin(held.pop(micro.index))
        return outputs

    def probe_latency(self, repeats: int) -> int:
        spare: List[torch.Tensor] = []
        for _ in range(repeats):
            buffer = self.stage.pool.try_checkout()  # clean: near miss, the break is the empty pool and all spares go back below
            if buffer is None:
                break
            spare.append(buffer)
        depth = len(spare)
        while spare:
            self.stage.pool.checkin(spare.pop())
        return depth

    def ping(self, peer: int) -> bool:
        token = self.stage.pool.try_checkout()  # clean: near miss, both guarded blocks test the same unchanged value
        if token is not None:
            token.fill_(float(self.stage.link.rank))
            self.stage.link.isend(token, peer).result()
        ok = token is not None
        if ok:
            self.stage.pool.checkin(token)
        return ok
