from __future__ import annotations

from collections import deque
from typing import Callable, Deque, Dict, List, Optional

import torch

from .buffers import BufferBook, P2PBuffer
from .comm import P2PComm

Fn = Callable[[torch.Tensor], torch.Tensor]


class PipelineStage:
    def __init__(self, book: BufferBook, comm: P2PComm, forward: Fn, backward: Fn):
        self.book = book
        self.comm = comm
        self.forward = forward
        self.backward = backward
        self.saved: Deque[P2PBuffer] = deque()
        self.grads: Dict[int, P2PBuffer] = {}
        self.skipped = 0

    def forward_step(self, mb: int) -> bool:
        inp = self.comm.arrival(mb)
        if inp is None:
            return False
        out = self.book.get(mb)  # clean: near miss, comm.send() puts it back, at once or when drained
        if out is None:
            self.book.put(inp)
            return False
        out.tensor.copy_(self.forward(inp.tensor))
        self.saved.append(inp)
        self.comm.send(out)
        return True

    def forward_blocking(self, mb: int) -> bool:
        inp = self.comm.recv(mb)  # leak: without an output buffer the received input is dropped
        if inp is None:
            return False
        out = self.book.get(mb)  # clean: sent and put back when drained
        if out is None:
            self.skipped += 1
            return False
        out.tensor.copy_(self.forward(inp.tensor))
        self.saved.append(inp)
        self.comm.send(out)
        return True

    def backward_step(self) -> Optional[int]:
        if not self.saved:
            return None
        inp = self.saved.popleft()
        grad = self.book.get(inp.microbatch)  # leak: abort() forgets the gradient table
        if grad is None:
            self.saved.appendleft(inp)
            return None
        grad.tensor.copy_(self.backward(inp.tensor))
        mb = inp.microbatch
        self.book.put(inp)
        stale = self.grads.pop(mb, None)
        if stale is not None:
            self.book.put(stale)
        self.grads[mb] = grad
        return mb

    def flush_grads(self) -> List[int]:
        done = sorted(self.grads)
        for mb in done:
            self.comm.send(self.grads.pop(mb))
        self.comm.drain()
        return done

    def warmup(self, n: int) -> int:
        primed = 0
        for mb in range(n):
            pair = self.book.get_pair(mb)  # leak: only the forward half of the pair is put back
            if pair is None:
                break
            fwd, _bwd = pair
            fwd.tensor.zero_()
            self.forward(fwd.tensor)
            self.book.put(fwd)
            primed += 1
        return primed

    def dry_run(self, n: int) -> int:
        ok = 0
        for mb in range(n):
            with self.book.lent(mb) as buf:  # clean: near miss, the continue leaves through the context manager
                if buf is None:
                    continue
                self.forward(buf.tensor)
                ok += 1
        return ok

    def validate(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        pair = self.book.get_pair(-2)  # clean: near miss, both halves are put back before the result is returned
        if pair is None:
            return None
        src, dst = pair
        src.tensor.copy_(x)
        dst.tensor.copy_(self.forward(src.tensor))
        result = dst.tensor.clone()
        for buf in pair:
            self.book.put(buf)
        return result

    def abort(self) -> None:
        self.comm.cancel()
        while self.saved:
            self.book.put(self.saved.popleft())
        self.grads.clear()
