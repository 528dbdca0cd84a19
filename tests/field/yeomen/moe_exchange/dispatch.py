"""All-to-all of tokens to the ranks of their experts, and back."""
import logging

import torch

from .heap import SymmetricHeap

log = logging.getLogger(__name__)


class DispatchHandle:
    def __init__(self, send, recv, counts, order):
        self.send = send
        self.recv = recv
        self.counts = counts
        self.order = order
        self.done = False

    def finish(self):
        """Call it when the results are combined."""
        if self.done:
            return
        self.done = True
        self.send.free()
        self.recv.free()


class Dispatcher:
    def __init__(self, heap: SymmetricHeap, comm, hidden: int) -> None:
        self.heap = heap
        self.comm = comm
        self.hidden = hidden
        self.flags = heap.alloc(4096, "flags")  # clean: freed by close()
        self._spare = None

    def _bytes(self, tokens: int) -> int:
        return max(1, tokens) * self.hidden * 2

    def dispatch(self, x: torch.Tensor, experts: torch.Tensor) -> DispatchHandle:
        order = experts.argsort()
        counts = torch.bincount(experts, minlength=self.comm.world)
        incoming = self.comm.exchange_counts(counts)
        send = self.heap.alloc(self._bytes(len(x)), "send")  # leak: HeapFull for the receive buffer, which the layer takes as a reason to go dense
        recv = self.heap.alloc(self._bytes(int(incoming.sum())), "recv")  # clean: goes to the caller in the handle
        send.as_tensor((len(x), self.hidden), x.dtype).copy_(x[order])
        self.comm.put_all(send.offset, recv.offset, counts)
        return DispatchHandle(send, recv, incoming, order)

    def combine(self, handle: DispatchHandle, y: torch.Tensor, out: torch.Tensor) -> None:
        back = self._spare or self.heap.alloc(self._bytes(len(out)), "back")  # clean: near miss, becomes the spare one or is freed
        self._spare = None
        self.comm.put_back(y, back.offset, handle.counts)
        out[handle.order] = back.as_tensor(out.shape, out.dtype)
        if (1 << back.order) >= self._bytes(256):
            self._spare = back
        else:
            back.free()

    def reduce_stats(self, values: torch.Tensor) -> torch.Tensor:
        pair = self.heap.alloc_pair(values.numel() * 4, "stats")  # clean: None is the other path, both are freed
        if pair is None:
            return self.comm.all_reduce(values)
        try:
            pair[0].as_tensor(values.shape, torch.float32).copy_(values)
            self.comm.ring_reduce(pair[0].offset, pair[1].offset)
            return pair[0].as_tensor(values.shape, torch.float32).clone()
        finally:
            for slab in pair:
                slab.free()

    def close(self) -> None:
        self.flags.free()
        if self._spare is not None:
            self._spare.free()
            self._spare = None
