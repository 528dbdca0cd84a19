"""Expert-parallel dispatch and combine over pooled communication buffers."""
from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist


class CommBuffers:
    def __init__(self, counts: dict[str, int], nbytes: int) -> None:
        self._lock = threading.Lock()
        self._free: dict[str, deque[torch.Tensor]] = defaultdict(deque)
        for kind, count in counts.items():
            for _ in range(count):
                self._free[kind].append(torch.empty(nbytes, dtype=torch.uint8))

    def get(self, kind: str) -> Optional[torch.Tensor]:
        with self._lock:
            return self._free[kind].popleft() if self._free[kind] else None

    def get_aligned(self, kind: str, align: int) -> Optional[torch.Tensor]:
        with self._lock:
            while self._free[kind]:
                buf = self._free[kind].popleft()  # leak: buffers with the wrong alignment are taken off the deque and forgotten
                if buf.data_ptr() % align == 0:
                    return buf
            return None

    def put(self, kind: str, buf: torch.Tensor) -> None:
        with self._lock:
            self._free[kind].append(buf)


class Arena:
    """Bump allocator; a mark must be popped for its space to come back."""

    def __init__(self, nbytes: int) -> None:
        self._base = torch.empty(nbytes, dtype=torch.uint8)
        self._marks: list[int] = []
        self._top = 0

    def push(self) -> int:
        self._marks.append(self._top)
        return len(self._marks)

    def pop(self) -> None:
        self._top = self._marks.pop()

    def carve(self, nbytes: int) -> Optional[torch.Tensor]:
        if self._top + nbytes > self._base.numel():
            return None
        out = self._base[self._top: self._top + nbytes]
        self._top += nbytes
        return out


@dataclass(eq=False)
class DispatchHandle:
    send: torch.Tensor
    recv: torch.Tensor
    counts: torch.Tensor
    layer: int
    work: Optional[dist.Work] = None


class ExpertRunner:
    def __init__(self, bufs: CommBuffers, arena: Arena, layers: int, low_latency: bool) -> None:
        self.bufs = bufs
        self.arena = arena
        self.layers = layers
        self.low_latency = low_latency
        self.open: dict[int, DispatchHandle] = {}
        self._stats = bufs.get("recv")  # clean: near miss, held for the statistics on purpose and put back by close()

    def dispatch(self, layer: int, x: torch.Tensor, counts: torch.Tensor) -> Optional[DispatchHandle]:
        send = self.bufs.get("send")  # leak: None from the recv pool returns without putting send back
        if send is None:
            return None
        recv = self.bufs.get("recv")  # clean: goes into the handle, which combine() and cancel() put back
        if recv is None:
            return None
        flat = x.contiguous().view(torch.uint8).flatten()
        send[: flat.numel()].copy_(flat)
        handle = DispatchHandle(send, recv, counts, layer)
        handle.work = dist.all_to_all_single(recv, send, async_op=True)
        return handle

    def dispatch_ll(self, layer: int, x: torch.Tensor, counts: torch.Tensor) -> Optional[DispatchHandle]:
        send = self.bufs.get("send")  # clean: near miss, put back when recv is None, else in the handle
        if send is None:
            return None
        recv = self.bufs.get_aligned("recv", 128)  # clean: goes into the handle
        if recv is None:
            self.bufs.put("send", send)
            return None
        flat = x.contiguous().view(torch.uint8).flatten()
        send[: flat.numel()].copy_(flat)
        handle = DispatchHandle(send, recv, counts, layer)
        handle.work = dist.all_to_all_single(recv, send, async_op=True)
        return handle

    def _put_back(self, handle: DispatchHandle) -> None:
        self.bufs.put("send", handle.send)
        self.bufs.put("recv", handle.recv)

    def combine(self, handle: DispatchHandle, out: torch.Tensor) -> torch.Tensor:
        if handle.work is not None:
            handle.work.wait()
        flat = out.view(torch.uint8).flatten()
        flat.copy_(handle.recv[: flat.numel()])
        self._put_back(handle)
        return out

    def cancel(self, handle: DispatchHandle) -> None:
        if handle.work is not None:
            handle.work.wait()
        self._put_back(handle)

    def forward(self, layer: int, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.low_latency:
            handle = self.dispatch_ll(layer, x, counts)  # clean: near miss, both flags meet in the combine below
        else:
            handle = self.dispatch(layer, x, counts)  # clean: near miss, combined below
        if handle is None:
            return x
        return self.combine(handle, torch.empty_like(x))

    def forward_sparse(self, layer: int, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        handle = self.dispatch(layer, x, counts)  # leak: without any routed token the handle is neither combined nor cancelled
        if handle is None:
            return x
        if int(counts.sum()) == 0:
            return torch.zeros_like(x)
        return self.combine(handle, torch.empty_like(x))

    def start(self, layer: int, x: torch.Tensor, counts: torch.Tensor) -> bool:
        if layer in self.open:
            return False
        handle = self.dispatch_ll(layer, x, counts)  # clean: near miss, kept in open, which wait() and close() empty
        if handle is None:
            return False
        self.open[layer] = handle
        return True

    def wait(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        handle = self.open.pop(layer, None)
        if handle is None:
            return x
        return self.combine(handle, torch.empty_like(x))

    def group_gemm(self, tokens: torch.Tensor, weights: list[torch.Tensor], counts: list[int]) -> Optional[torch.Tensor]:
        self.arena.push()  # leak: the return for a full arena passes over the pop
        outs: list[torch.Tensor] = []
        pos = 0
        for weight, count in zip(weights, counts):
            nbytes = count * weight.shape[1] * tokens.element_size()
            space = self.arena.carve(nbytes)
            if space is None:
                return None
            out = space.view(tokens.dtype).view(count, weight.shape[1])
            torch.matmul(tokens[pos: pos + count], weight, out=out)
            outs.append(out)
            pos += count
        merged = torch.cat(outs)
        self.arena.pop()
        return merged

    def permute(self, tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        self.arena.push()  # clean: popped in finally on either return
        try:
            space = self.arena.carve(tokens.numel() * tokens.element_size())
            if space is None:
                return tokens[order]
            out = space.view(tokens.dtype).view_as(tokens)
            torch.index_select(tokens, 0, order, out=out)
            return out.clone()
        finally:
            self.arena.pop()

    def calibrate(self, samples: list[torch.Tensor]) -> float:
        peak = 0.0
        buf: Optional[torch.Tensor] = None
        for sample in samples:
            buf = self.bufs.get("send")  # leak: every sample rebinds buf and only the last one is put back
            if buf is None:
                break
            flat = sample.view(torch.uint8).flatten()
            buf[: flat.numel()].copy_(flat)
            peak = max(peak, float(flat.max()))
        if buf is not None:
            self.bufs.put("send", buf)
        return peak

    def close(self) -> None:
        for handle in self.open.values():
            self.cancel(handle)
        self.open.clear()
        if self._stats is not None:
            self.bufs.put("recv", self._stats)
            self._stats = None
