"""Expert-parallel dispatch and combine over a symmetric heap of token buffers."""

import os
from dataclasses import dataclass
from typing import List, Optional, Tuple

import torch

DEBUG_EP = os.environ.get("DEBUG_EP", "0") == "1"


class SymmHeap:
    """Bump allocator with a per-size-class free list."""

    def __init__(self, total_tokens: int, hidden: int):
        self.base = torch.zeros(total_tokens, hidden)
        self.cursor = 0
        self.by_size = {}

    def symm_alloc(self, tokens: int) -> torch.Tensor:
        stack = self.by_size.get(tokens)
        if stack:
            return stack.pop()
        if self.cursor + tokens > self.base.shape[0]:
            raise RuntimeError("symmetric heap exhausted")
        t = self.base[self.cursor : self.cursor + tokens]
        self.cursor += tokens
        return t

    def symm_free(self, t: torch.Tensor) -> None:
        self.by_size.setdefault(t.shape[0], []).append(t)


@dataclass
class DispatchHandle:
    recv: torch.Tensor
    splits: List[int]
    combine_buf: Optional[torch.Tensor] = None


def route(logits: torch.Tensor, k: int) -> Tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(torch.softmax(logits, -1), k, dim=-1)


class Dispatcher:
    def __init__(self, heap: SymmHeap, world: int, max_tokens: int, low_latency: bool):
        self.heap = heap
        self.world = world
        self.max_tokens = max_tokens
        self.low_latency = low_latency
        self.ll_buf: Optional[torch.Tensor] = None
        if low_latency:
            self.ll_buf = heap.symm_alloc(max_tokens)  # clean: near miss, destroy releases it under the same low_latency mode

    def dispatch(self, x: torch.Tensor, splits: List[int]) -> DispatchHandle:
        recv = self.heap.symm_alloc(self.max_tokens)  # clean: leaves in the handle
        recv[: x.shape[0]].copy_(x)
        return DispatchHandle(recv, splits)

    def dispatch_padded(self, x: torch.Tensor, splits: List[int]) -> Optional[DispatchHandle]:
        send = self.heap.symm_alloc(self.max_tokens)  # leak: the mismatch branch frees recv only
        recv = self.heap.symm_alloc(self.max_tokens)  # clean: freed on mismatch, else leaves in the handle
        send[: x.shape[0]].copy_(x)
        if sum(splits) != x.shape[0]:
            self.heap.symm_free(recv)
            return None
        recv.copy_(send)
        self.heap.symm_free(send)
        return DispatchHandle(recv, splits)

    def release_handle(self, h: DispatchHandle) -> None:
        self.heap.symm_free(h.recv)
        if h.combine_buf is not None:
            self.heap.symm_free(h.combine_buf)
            h.combine_buf = None

    def combine(self, h: DispatchHandle, weights: torch.Tensor) -> torch.Tensor:
        h.combine_buf = self.heap.symm_alloc(self.max_tokens)  # clean: near miss, release_handle frees the field next to recv
        torch.mul(h.recv, weights, out=h.combine_buf)
        out = h.combine_buf[: sum(h.splits)].clone()
        self.release_handle(h)
        return out

    def destroy(self) -> None:
        if self.low_latency:
            self.heap.symm_free(self.ll_buf)
            self.ll_buf = None


class MoELayer:
    def __init__(self, disp: Dispatcher, experts, top_k: int):
        self.disp = disp
        self.experts = experts
        self.top_k = top_k

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        w, idx = route(logits, self.top_k)
        splits = torch.bincount(idx.flatten(), minlength=len(self.experts)).tolist()
        h = self.disp.dispatch(x, splits)  # clean: combine releases the handle
        for e, expert in enumerate(self.experts):
            h.recv.copy_(expert(h.recv))
        return self.disp.combine(h, w.sum(-1, keepdim=True))

    def forward_skip_empty(self, x: torch.Tensor, splits: List[int]) -> torch.Tensor:
        h = self.disp.dispatch(x, splits)  # leak: the all-empty shortcut returns x and forgets the handle
        if not any(splits):
            return x
        y = self.experts[0](h.recv).clone()
        self.disp.release_handle(h)
        return y

    def forward_chunked(self, chunks: List[torch.Tensor]) -> List[torch.Tensor]:
        handles = [self.disp.dispatch(c, [c.shape[0]]) for c in chunks]  # clean: near miss, handles are released in the second loop
        outs = []
        for h, c in zip(handles, chunks):
            outs.append(h.recv[: c.shape[0]].clone())
        for h in reversed(handles):
            self.disp.release_handle(h)
        return outs

    def forward_padded(self, x: torch.Tensor) -> torch.Tensor:
        h = self.disp.dispatch_padded(x, [x.shape[0]])  # leak: only the debug build releases the handle
        if h is None:
            raise RuntimeError("split mismatch")
        y = h.recv[: x.shape[0]].clone()
        if DEBUG_EP:
            print("recv norm", float(y.norm()))
            self.disp.release_handle(h)
        return y

    def overlap(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        h = self.disp.dispatch(first, [first.shape[0]])  # leak: rebound to the second handle before being released
        total = h.recv.sum(0)
        h = self.disp.dispatch(second, [second.shape[0]])  # clean: released at the end
        total = total + h.recv.sum(0)
        self.disp.release_handle(h)
        return total
