"""Workspaces for tensor parallel layers.

Gather and scatter outputs are reused between layers.  They are cached by
(shape, dtype); a workspace in use is not in the cache.
"""
import logging
import math
from collections import OrderedDict, defaultdict

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_free = defaultdict(list)
_in_use = {}
_limit_bytes = 1 << 30
_live_bytes = 0


def ws_get(shape, dtype, device="cuda"):
    """Module-level cache: a tensor of this shape, or None above the limit."""
    global _live_bytes
    key = (tuple(shape), dtype)
    if _free[key]:
        t = _free[key].pop()  # clean: registered in _in_use and returned
    else:
        nbytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        if _live_bytes + nbytes > _limit_bytes:
            return None
        _live_bytes += nbytes
        t = torch.empty(shape, dtype=dtype, device=device)
    _in_use[t.data_ptr()] = key
    return t


def ws_put(t):
    key = _in_use.pop(t.data_ptr())
    _free[key].append(t)


def ws_get_or_alloc(shape, dtype):
    """(tensor, pooled): the flag tells who must put it back."""
    t = ws_get(shape, dtype)  # clean: returned with the pooled flag set
    if t is not None:
        return t, True
    return torch.empty(shape, dtype=dtype, device="cuda"), False


class workspace:
    """with workspace(shape, dtype) as t: ..."""

    def __init__(self, shape, dtype):
        self.shape = shape
        self.dtype = dtype
        self.t = None

    def __enter__(self):
        self.t = ws_get(self.shape, self.dtype)  # leak: __exit__ returns early when the body raised
        if self.t is None:
            raise MemoryError(f"workspace {self.shape}")
        return self.t

    def __exit__(self, et, ev, tb):
        if et is not None:
            logger.error("workspace body failed: %s", ev)
            return False
        ws_put(self.t)
        self.t = None
        return False


class ShapePool:
    """A bounded pool of its own on top of the module cache."""

    def __init__(self, max_idle=8):
        self.idle = OrderedDict()
        self.max_idle = max_idle

    def lend(self, shape, dtype):
        bucket = self.idle.get((shape, dtype))
        if bucket:
            return bucket.pop()  # clean: returned to the caller
        return ws_get(shape, dtype)  # clean: returned to the caller

    def give(self, t):
        bucket = self.idle.setdefault((tuple(t.shape), t.dtype), [])
        if len(bucket) >= self.max_idle:
            ws_put(t)
        else:
            bucket.append(t)

    def resize(self, t, shape):
        """Move the content to another shape."""
        bigger = self.lend(shape, t.dtype)  # clean: returned to the caller, t is given back
        if bigger is None:
            return t
        n = min(t.numel(), bigger.numel())
        bigger.view(-1)[:n].copy_(t.view(-1)[:n])
        self.give(t)
        return bigger

    def flush(self):
        for bucket in self.idle.values():
            for t in bucket:
                ws_put(t)
        self.idle.clear()


class ColumnParallelLinear(torch.nn.Module):
    def __init__(self, weight, group, pool, gather=True):
        super().__init__()
        self.weight = weight
        self.group = group
        self.pool = pool
        self.gather = gather
        self.saved = None

    def forward(self, x):
        y = torch.nn.functional.linear(x, self.weight)
        if not self.gather:
            return y
        world = dist.get_world_size(self.group)
        full = self.pool.lend((world, *y.shape), y.dtype)  # clean: given back after the concatenation
        if full is None:
            return _slow_gather(y, self.group)
        dist.all_gather_into_tensor(full, y, group=self.group)
        out = torch.cat(full.unbind(0), dim=-1)
        self.pool.give(full)
        return out

    def forward_sp(self, x):
        """Sequence parallel input: gather along the sequence first."""
        world = dist.get_world_size(self.group)
        full = self.pool.lend((world * x.shape[0], *x.shape[1:]), x.dtype)  # leak: in eval mode the gathered input is dropped
        if full is None:
            return None
        dist.all_gather_into_tensor(full, x, group=self.group)
        y = torch.nn.functional.linear(full, self.weight)
        if self.training:
            if self.saved is not None:
                self.pool.give(self.saved)
            self.saved = full
        return y

    def backward_sp(self, grad):
        if self.saved is None:
            return None
        dw = grad.flatten(0, -2).t() @ self.saved.flatten(0, -2)
        self.pool.give(self.saved)
        self.saved = None
        return dw

    def lora_delta(self, x, a, b):
        mid, pooled = ws_get_or_alloc((*x.shape[:-1], a.shape[0]), x.dtype)  # clean: near miss, put back when the flag says pooled
        torch.matmul(x, a.t(), out=mid)
        out = mid @ b.t()
        if pooled:
            ws_put(mid)
        return out

    def lora_norm(self, x, a):
        mid, pooled = ws_get_or_alloc((*x.shape[:-1], a.shape[0]), x.dtype)  # leak: never put back when the flag says pooled
        torch.matmul(x, a.t(), out=mid)
        norm = mid.norm()
        if not pooled:
            del mid
        return norm


def _slow_gather(y, group):
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, y, group=group)
    return torch.cat(parts, dim=-1)


def gathered(y, group):
    """Gathered copy in a workspace that the caller puts back."""
    world = dist.get_world_size(group)
    t = ws_get((world, *y.shape), y.dtype)  # clean: returned to the caller, None-checked
    if t is None:
        return None
    dist.all_gather_into_tensor(t, y, group=group)
    return t


def max_across(y, group):
    t = gathered(y, group)  # leak: the maximum is computed and the workspace dropped
    if t is None:
        return _slow_gather(y, group).max()
    return t.amax(dim=0).max()


def vocab_parallel_loss(logits, target, group, rank, pool):
    scratch = pool.lend(tuple(logits.shape), torch.float32)  # leak: an ignored batch returns before give()
    if scratch is None:
        raise MemoryError("logits workspace")
    start = rank * logits.shape[-1]
    mask = (target >= start) & (target < start + logits.shape[-1])
    if not mask.any() and dist.get_world_size(group) == 1:
        return logits.new_zeros(())
    scratch.copy_(logits)
    top = scratch.amax(dim=-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    scratch.sub_(top.unsqueeze(-1)).exp_()
    denom = scratch.sum(dim=-1)
    dist.all_reduce(denom, group=group)
    picked = logits.gather(-1, (target - start).clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    loss = (denom.log() + top - picked.masked_fill(~mask, 0)).mean()
    pool.give(scratch)
    return loss
