from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterator, Optional

import torch
from torch import nn


@dataclass(eq=False)
class HostBuffer:
    storage: torch.Tensor
    nbytes: int
    event: Optional[torch.cuda.Event] = None


class PinnedBufferPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._idle = [HostBuffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), nbytes) for _ in range(count)]

    def borrow(self) -> Optional[HostBuffer]:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def give_back(self, buf: HostBuffer) -> None:
        buf.event = None
        with self._lock:
            self._idle.append(buf)

    def borrow_all(self, count: int) -> Optional[list[HostBuffer]]:
        got: list[HostBuffer] = []
        for _ in range(count):
            buf = self.borrow()  # leak: the part already borrowed is dropped with the list when the pool runs dry
            if buf is None:
                return None
            got.append(buf)
        return got

    @contextmanager
    def lend(self) -> Iterator[Optional[HostBuffer]]:
        buf = self.borrow()  # clean: near miss, None is yielded too and the finally looks before it gives back
        try:
            yield buf
        finally:
            if buf is not None:
                self.give_back(buf)


@dataclass
class LayerSlot:
    index: int
    params: list[nn.Parameter]
    host: list[torch.Tensor] = field(default_factory=list)
    staging: Optional[HostBuffer] = None
    on_device: bool = True


def _view(buf: HostBuffer, like: torch.Tensor) -> torch.Tensor:
    n = like.numel() * like.element_size()
    return buf.storage[:n].view(like.dtype).view(like.shape)


class LayerOffloader:
    def __init__(self, layers: list[nn.Module], pool: PinnedBufferPool, device: torch.device) -> None:
        self.pool = pool
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.slots = [LayerSlot(i, list(m.parameters())) for i, m in enumerate(layers)]
        self._inflight: dict[int, HostBuffer] = {}

    def snapshot(self, slot: LayerSlot) -> list[torch.Tensor]:
        copies: list[torch.Tensor] = []
        for p in slot.params:
            buf = self.pool.borrow()  # leak: the pinned buffer is cloned and its handle dropped at the next parameter
            if buf is None:
                copies.append(p.detach().cpu())
                continue
            view = _view(buf, p)
            view.copy_(p.detach())
            copies.append(view.clone())
        return copies

    def evict(self, index: int) -> None:
        slot = self.slots[index]
        if not slot.on_device:
            return
        with self.pool.lend() as buf:  # clean: lent for the body only
            for p in slot.params:
                if buf is None:
                    slot.host.append(p.detach().cpu())
                    continue
                view = _view(buf, p)
                view.copy_(p.detach())
                slot.host.append(view.clone())
        for p in slot.params:
            p.data = torch.empty(0, device=self.device)
        slot.on_device = False

    def prefetch(self, index: int) -> bool:
        slot = self.slots[index]
        if slot.on_device or index in self._inflight:
            return True
        buf = self.pool.borrow()  # clean: near miss, kept under its index until wait() or cancel() takes it out
        if buf is None:
            return False
        event = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            for p, host in zip(slot.params, slot.host):
                staged = _view(buf, host)
                staged.copy_(host)
                p.data = staged.to(self.device, non_blocking=True)
                self.stream.synchronize()
            event.record(self.stream)
        buf.event = event
        self._inflight[index] = buf
        return True

    def wait(self, index: int) -> None:
        buf = self._inflight.pop(index, None)
        if buf is None:
            return
        if buf.event is not None:
            buf.event.synchronize()
        self.slots[index].on_device = True
        self.slots[index].host.clear()
        self.pool.give_back(buf)

    def cancel(self) -> None:
        self.stream.synchronize()
        while self._inflight:
            _, buf = self._inflight.popitem()
            self.pool.give_back(buf)

    def stage_window(self, start: int, width: int) -> None:
        for index in range(start, min(start + width, len(self.slots))):
            buf = self.pool.borrow()  # leak: the windows of consecutive steps overlap, a layer staged already loses its buffer
            if buf is None:
                break
            self.slots[index].staging = buf

    def unstage(self, index: int) -> None:
        slot = self.slots[index]
        if slot.staging is not None:
            self.pool.give_back(slot.staging)
            slot.staging = None

    def restage(self, index: int) -> None:
        slot = self.slots[index]
        if slot.staging is not None:
            self.pool.give_back(slot.staging)
        slot.staging = self.pool.borrow()  # clean: near miss, the previous one went back first and unstage() takes this one

    def forward_window(self, hidden: torch.Tensor, layers: list[nn.Module], width: int) -> torch.Tensor:
        for index, layer in enumerate(layers):
            self.stage_window(index, width)
            hidden = layer(hidden)
            self.unstage(index)
        return hidden


class OptimizerStateSwapper:
    def __init__(self, pool: PinnedBufferPool) -> None:
        self.pool = pool
        self.held: dict[str, list[HostBuffer]] = {}

    def swap_out(self, name: str, state: dict[str, torch.Tensor]) -> bool:
        bufs = self.pool.borrow_all(len(state))  # clean: kept under the name until swap_in
        if bufs is None:
            return False
        self.swap_in(name)
        for buf, t in zip(bufs, state.values()):
            _view(buf, t).copy_(t)
        self.held[name] = bufs
        return True

    def swap_in(self, name: str) -> None:
        for buf in self.held.pop(name, ()):
            self.pool.give_back(buf)

    def checksum(self, tensors: list[torch.Tensor]) -> list[float]:
        sums: list[float] = []
        for t in tensors:
            buf = self.pool.borrow()  # leak: an empty tensor continues past the give_back
            if buf is None:
                sums.append(float(t.double().sum()))
                continue
            if t.numel() == 0:
                sums.append(0.0)
                continue
            _view(buf, t).copy_(t)
            sums.append(float(_view(buf, t).double().sum()))
            self.pool.give_back(buf)
        return sums

    def max_abs(self, tensors: list[torch.Tensor]) -> float:
        best = 0.0
        buf = self.pool.borrow()  # clean: near miss, continue stays inside the loop and the buffer goes back after it
        if buf is None:
            return max((float(t.abs().max()) for t in tensors if t.numel()), default=best)
        for t in tensors:
            if t.numel() == 0:
                continue
            _view(buf, t).copy_(t)
            best = max(best, float(_view(buf, t).abs().max()))
        self.pool.give_back(buf)
        return best
