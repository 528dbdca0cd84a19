"""Scratch tensors for collectives, cached by shape and dtype.

Everything here is module level on purpose: the trainer has one communicator
thread and the scratch cache lives as long as the process.
"""
from contextlib import contextmanager

import torch
import torch.distributed as dist

_cache = {}
_out = 0


def borrow(shape, dtype=torch.float32, device="cuda"):
    global _out
    key = (tuple(shape), dtype, str(device))
    _out += 1
    stack = _cache.get(key)
    if stack:
        return stack.pop()
    return torch.empty(shape, dtype=dtype, device=device)


def give(t):
    global _out
    _out -= 1
    _cache.setdefault((tuple(t.shape), t.dtype, str(t.device)), []).append(t)


@contextmanager
def scratch(shape, dtype=torch.float32, device="cuda"):
    t = borrow(shape, dtype, device)  # clean: given back in finally
    try:
        yield t
    finally:
        give(t)


def gather_padded(x, group=None):
    world = dist.get_world_size(group)
    out = borrow((world,) + tuple(x.shape), x.dtype, x.device)  # clean: returned to the caller
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def gather_lengths(n, group=None):
    mine = torch.tensor([n], dtype=torch.int64, device="cuda")
    return gather_padded(mine, group).view(-1).tolist()  # leak: the gathered tensor is turned into a list and dropped


def gather_rows(x, lengths, group=None):
    padded = gather_padded(x, group)  # clean: given back after the rows are copied out
    rows = [padded[i, :n].clone() for i, n in enumerate(lengths)]
    give(padded)
    return rows


def reduce_scatter_mean(x, group=None):
    world = dist.get_world_size(group)
    if world == 1:
        return x.clone()
    pad = -x.numel() % world
    padded = None
    if pad:
        padded = borrow((x.numel() + pad,), x.dtype, x.device)  # clean: near miss, given back under the same test of pad
        padded[:x.numel()].copy_(x.view(-1))
        padded[x.numel():].zero_()
    src = padded if pad else x.view(-1)
    out = torch.empty(src.numel() // world, dtype=x.dtype, device=x.device)
    dist.reduce_scatter_tensor(out, src, group=group)
    if pad:
        give(padded)
    return out.div_(world)


def all_to_all_rows(x, in_splits, out_splits, group=None):
    total = sum(out_splits)
    recv = borrow((total, x.shape[1]), x.dtype, x.device)  # leak: not given back when nothing is to be received
    dist.all_to_all_single(recv, x, out_splits, in_splits, group=group)
    if total == 0:
        return x.new_empty((0, x.shape[1]))
    rows = recv.clone()
    give(recv)
    return rows


def broadcast_each(tensors, src, group=None):
    for t in tensors:
        flat = borrow((t.numel(),), t.dtype, t.device)  # leak: not given back for a contiguous tensor
        if t.is_contiguous():
            dist.broadcast(t, src, group=group)
            continue
        flat.copy_(t.reshape(-1))
        dist.broadcast(flat, src, group=group)
        t.copy_(flat.view(t.shape))
        give(flat)


def broadcast_changed(tensors, dirty, src, group=None):
    sent = 0
    for name, t in tensors.items():
        if name not in dirty:
            continue
        flat = borrow((t.numel(),), t.dtype, t.device)  # clean: near miss, the continue inside runs the finally
        try:
            flat.copy_(t.reshape(-1))
            dist.broadcast(flat, src, group=group)
            if dist.get_rank(group) == src:
                continue
            t.copy_(flat.view(t.shape))
            sent += 1
        finally:
            give(flat)
    return sent


def quantized_all_gather(x, group=None):
    world = dist.get_world_size(group)
    q = borrow(x.shape, torch.int8, x.device)  # clean: given back on both ways out
    scale = borrow((1,), torch.float32, x.device)  # leak: not given back when the scale is not finite
    scale.copy_(x.abs().amax().view(1) / 127.0)
    if not torch.isfinite(scale).item():
        give(q)
        return None
    q.copy_((x / scale).round())
    qs = borrow((world,) + tuple(x.shape), torch.int8, x.device)  # clean: given back after dequantising
    dist.all_gather_into_tensor(qs, q, group=group)
    result = qs.float() * scale
    give(qs)
    give(scale)
    give(q)
    return result


def fire_and_forget(tensors, group=None):
    total = sum(t.numel() for t in tensors)
    flat = borrow((total,), tensors[0].dtype, tensors[0].device)  # clean: near miss, the future's callback gives it back
    torch.cat([t.view(-1) for t in tensors], out=flat)
    work = dist.all_reduce(flat, group=group, async_op=True)

    def _done(fut):
        off = 0
        for t in tensors:
            t.view(-1).copy_(flat[off:off + t.numel()])
            off += t.numel()
        give(flat)

    work.get_future().add_done_callback(_done)


def stream_chunks(x, size):
    stage = borrow((size,), x.dtype, x.device)  # leak: not given back when a short last chunk returns early
    flat = x.view(-1)
    for off in range(0, flat.numel(), size):
        if flat.numel() - off < size:
            yield flat[off:].clone()
            return
        stage.copy_(flat[off:off + size])
        yield stage
    give(stage)


class OverlapGather:
    """One gather in flight at a time; start() while busy is refused."""

    def __init__(self, group=None):
        self.group = group
        self._buf = None
        self._work = None

    def start(self, x):
        if self._buf is not None:
            return False
        world = dist.get_world_size(self.group)
        self._buf = borrow((world, x.numel()), x.dtype, x.device)  # clean: held in _buf until finish()
        self._work = dist.all_gather_into_tensor(self._buf, x.view(-1), group=self.group, async_op=True)
        return True

    def finish(self):
        if self._buf is None:
            return None
        self._work.wait()
        result = self._buf.clone()
        give(self._buf)
        self._buf = self._work = None
        return result


def norm_and_max(x, group=None):
    with scratch((2,), torch.float32, x.device) as pair:  # clean: the with statement gives it back
        pair[0] = x.float().pow(2).sum()
        pair[1] = x.abs().amax()
        if not torch.isfinite(pair).all():
            return None
        dist.all_reduce(pair[:1], group=group)
        dist.all_reduce(pair[1:], op=dist.ReduceOp.MAX, group=group)
        return float(pair[0]) ** 0.5, float(pair[1])
