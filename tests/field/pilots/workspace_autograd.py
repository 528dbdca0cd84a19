from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd import Function


class Workspace:
    __slots__ = ("buffer", "pool", "tag")

    def __init__(self, buffer: Tensor, pool: "WorkspacePool"):
        self.buffer = buffer
        self.pool = pool
        self.tag = ""

    def view(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        n = dtype.itemsize
        for s in shape:
            n *= s
        return self.buffer[:n].view(dtype).view(*shape)

    def release(self) -> None:
        self.pool._put(self)


class WorkspacePool:
    _instance: Optional["WorkspacePool"] = None

    def __init__(self, nbytes: int, count: int):
        self.nbytes = nbytes
        self._cv = threading.Condition()
        self._idle = [Workspace(torch.empty(nbytes, dtype=torch.uint8, device="cuda"), self) for _ in range(count)]

    @classmethod
    def instance(cls) -> "WorkspacePool":
        if cls._instance is None:
            cls._instance = cls(64 << 20, 16)
        return cls._instance

    def lease(self, tag: str = "") -> Workspace:
        with self._cv:
            while not self._idle:
                self._cv.wait()
            ws = self._idle.pop()
        ws.tag = tag
        return ws

    def lease_nowait(self, tag: str, min_bytes: int = 0) -> Optional[Workspace]:
        with self._cv:
            if not self._idle:
                return None
            ws = self._idle.pop()  # leak: a request larger than the buffers returns None after the pop
            if ws.buffer.numel() < min_bytes:
                return None
        ws.tag = tag
        return ws

    def _put(self, ws: Workspace) -> None:
        with self._cv:
            self._idle.append(ws)
            self._cv.notify()


class BlockSparseSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, layout: Tensor) -> Tensor:
        ws = WorkspacePool.instance().lease("bs_softmax")  # leak: scores without grad get no backward, so ctx.ws is never released
        mask = ws.view(*layout.shape)
        mask.copy_(layout)
        probs = torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1)
        ctx.ws = ws
        ctx.mask = mask
        ctx.save_for_backward(probs)
        return probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], None]:
        (probs,) = ctx.saved_tensors
        inner = grad * probs
        dx = (inner - probs * inner.sum(-1, keepdim=True)).masked_fill(ctx.mask == 0, 0)
        ctx.ws.release()
        ctx.ws = None
        return dx, None


class FusedGeglu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ws = WorkspacePool.instance().lease("geglu")  # clean: near miss, released here without grad and by backward with it
        act = ws.view(*gate.shape, dtype=gate.dtype)
        act.copy_(torch.nn.functional.gelu(gate))
        out = x * act
        if any(ctx.needs_input_grad):
            ctx.ws, ctx.act = ws, act
            ctx.save_for_backward(x, gate)
        else:
            ws.release()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional[Tensor], Optional[Tensor]]:
        x, gate = ctx.saved_tensors
        dx = grad * ctx.act
        dgate: Optional[Tensor] = None
        if ctx.needs_input_grad[1]:
            tmp = WorkspacePool.instance().lease("geglu_bwd")  # clean: near miss, taken and released under the one condition
            cdf = tmp.view(*gate.shape, dtype=gate.dtype)
            cdf.copy_(0.5 * (1 + torch.erf(gate * 0.70710678)))
            dgate = grad * x * (cdf + gate * torch.exp(-0.5 * gate * gate) * 0.39894228)
            tmp.release()
        ctx.ws.release()
        return dx, dgate


class ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
        pool = WorkspacePool.instance()
        total = logits.new_zeros(())
        for i in range(0, logits.shape[0], chunk):
            part, lab = logits[i : i + chunk], labels[i : i + chunk]
            ws = pool.lease("ce")  # leak: a chunk with only ignored labels continues with the workspace held
            probs = ws.view(*part.shape)
            torch.softmax(part.float(), dim=-1, out=probs)
            valid = lab != -100
            if not valid.any():
                continue
            total += -torch.log(probs[valid, lab[valid]]).sum()
            ws.release()
        ctx.save_for_backward(logits, labels)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        ws = WorkspacePool.instance().lease("ce_bwd")  # clean: released after the gradient has been copied out
        probs = ws.view(*logits.shape)
        torch.softmax(logits.float(), dim=-1, out=probs)
        valid = labels != -100
        probs[valid, labels[valid]] -= 1
        probs[~valid] = 0
        out = (probs * grad).to(logits.dtype)
        ws.release()
        return out, None, None


class workspace(AbstractContextManager):
    def __init__(self, tag: str, reuse: Optional[Workspace] = None):
        self.tag = tag
        self.reuse = reuse
        self.ws: Optional[Workspace] = None

    def __enter__(self) -> Workspace:
        self.ws = self.reuse or WorkspacePool.instance().lease(self.tag)  # clean: near miss, __exit__ releases whatever was not lent by the caller
        return self.ws

    def __exit__(self, *exc: Any) -> None:
        if self.reuse is not None:
            return
        self.ws.release()
        self.ws = None


class timed_workspace(AbstractContextManager):
    def __init__(self, tag: str, log: dict[str, float]):
        self.tag, self.log = tag, log
        self.start = torch.cuda.Event(enable_timing=True)
        self.stop = torch.cuda.Event(enable_timing=True)

    def __enter__(self) -> Workspace:
        self.ws = WorkspacePool.instance().lease(self.tag)  # leak: __exit__ returns before the release when the tag was timed already
        self.start.record()
        return self.ws

    def __exit__(self, *exc: Any) -> None:
        self.stop.record()
        if self.tag in self.log:
            return
        self.stop.synchronize()
        self.log[self.tag] = self.start.elapsed_time(self.stop)
        self.ws.release()


def paged_scores(q: Tensor, pages: list[Tensor]) -> Tensor:
    with workspace("paged") as ws:  # clean: the with block leaves through __exit__
        out = ws.view(q.shape[0], sum(p.shape[0] for p in pages))
        col = 0
        for page in pages:
            out[:, col : col + page.shape[0]] = q @ page.T
            col += page.shape[0]
        return out.clone()


def topk_mask(scores: Tensor, k: int) -> Tensor:
    ws = WorkspacePool.instance().lease_nowait("topk", scores.nbytes)  # clean: near miss, the fallback return holds nothing
    if ws is None:
        return scores >= scores.topk(k, dim=-1).values[..., -1:]
    buf = ws.view(*scores.shape, dtype=scores.dtype)
    buf.copy_(scores)
    keep = buf >= buf.topk(k, dim=-1).values[..., -1:]
    ws.release()
    return keep


def split_k_matmul(a: Tensor, b: Tensor, splits: int) -> Tensor:
    pool = WorkspacePool.instance()
    left = pool.lease("splitk_a")  # clean: near miss, goes back on both ways out
    right = pool.lease_nowait("splitk_b", a.shape[0] * b.shape[1] * 4)  # leak: the single-split shortcut releases only left
    if right is None or splits == 1:
        left.release()
        return a @ b
    acc, part = left.view(a.shape[0], b.shape[1]), right.view(a.shape[0], b.shape[1])
    acc.zero_()
    for x, y in zip(a.chunk(splits, 1), b.chunk(splits, 0)):
        torch.mm(x.float(), y.float(), out=part)
        acc += part
    out = acc.to(a.dtype)
    left.release()
    right.release()
    return out
