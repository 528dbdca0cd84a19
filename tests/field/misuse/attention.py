"""Attention with pooled temporaries: what autograd keeps, what nobody wrote, what was not the pool's."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, pool, dim):
        super().__init__()
        self.pool = pool
        self.scale = nn.Parameter(torch.ones(dim))
        self.proj = nn.Linear(dim, dim)

    def scores(self, q, k):
        work = self.pool.allocate((q.shape[0], k.shape[0]), q.dtype)
        work.copy_(q @ k.transpose(0, 1))
        out = work * self.scale
        self.pool.deallocate(work)
        return out

    def scores_not_recorded(self, q, k):
        with torch.no_grad():
            work = self.pool.allocate((q.shape[0], k.shape[0]), q.dtype)
            work.copy_(q @ k.transpose(0, 1))
            out = work * self.scale
            self.pool.deallocate(work)
        return out

    def projected(self, x):
        padded = self.pool.allocate((x.shape[0] + 1, x.shape[1]), x.dtype)
        padded.zero_()
        padded[: x.shape[0]] = x
        out = self.proj(padded)
        self.pool.deallocate(padded)
        return out

    @torch.no_grad()
    def projected_in_inference(self, x):
        padded = self.pool.allocate((x.shape[0] + 1, x.shape[1]), x.dtype)
        padded.zero_()
        padded[: x.shape[0]] = x
        out = self.proj(padded)
        self.pool.deallocate(padded)
        return out

    def added(self, x):
        work = self.pool.allocate(x.shape, x.dtype)
        work.copy_(x)
        out = work + self.scale
        self.pool.deallocate(work)
        return out

    def normalised(self, x):
        work = self.pool.allocate(x.shape, x.dtype)
        work.copy_(x)
        out = F.layer_norm(work, work.shape[-1:])
        self.pool.deallocate(work)
        return out

    def probabilities(self, x):
        work = self.pool.allocate(x.shape, x.dtype)
        work.copy_(x)
        out = torch.softmax(work, dim=-1)
        self.pool.deallocate(work)
        return out

    def attend(self, q, k, v):
        keys = self.pool.allocate(k.shape, k.dtype)
        keys.copy_(k)
        view = keys.view(k.shape)
        out = F.scaled_dot_product_attention(q, view, v)
        self.pool.deallocate(keys)
        return out

    def activated(self, x):
        work = self.pool.allocate(x.shape, x.dtype)
        work.copy_(x)
        out = F.silu(work)
        self.pool.deallocate(work)
        return out

    def statistic(self, x):
        work = self.pool.allocate(x.shape, x.dtype)
        work.copy_(x)
        largest = (work * self.scale).detach().amax()
        self.pool.deallocate(work)
        return largest


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, pool):
        work = pool.allocate(x.shape, x.dtype)
        work.copy_(x)
        out = work * weight
        pool.deallocate(work)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def accumulate(pool, parts):
    total = pool.allocate(parts[0].shape, parts[0].dtype)
    for part in parts:
        total += part
    out = total.clone()
    pool.deallocate(total)
    return out


def accumulate_cleared(pool, parts):
    total = pool.allocate(parts[0].shape, parts[0].dtype, zero=True)
    for part in parts:
        total += part
    out = total.clone()
    pool.deallocate(total)
    return out


def accumulate_zeroed(pool, parts):
    total = pool.allocate(parts[0].shape, parts[0].dtype)
    total.zero_()
    for part in parts:
        total.add_(part)
    out = total.clone()
    pool.deallocate(total)
    return out


def added_in_place(pool, x):
    total = pool.allocate(x.shape, x.dtype)
    total.add_(x)
    out = total.clone()
    pool.deallocate(total)
    return out


def scattered(pool, index, x, n):
    sums = pool.allocate((n, x.shape[1]), x.dtype)
    sums.index_add_(0, index, x)
    out = sums.clone()
    pool.deallocate(sums)
    return out


def summed_before(pool, n):
    block = pool.allocate((n,), torch.float32)
    total = block.sum()
    block.fill_(total)
    pool.deallocate(block)
    return total


def summed_after(pool, n):
    block = pool.allocate((n,), torch.float32)
    block.normal_()
    total = block.sum()
    pool.deallocate(block)
    return total


def written_by_kernel(pool, kernel, x):
    block = pool.allocate(x.shape, x.dtype)
    kernel(x, block)
    total = block.sum()
    pool.deallocate(block)
    return total


def written_as_out(pool, a, b):
    block = pool.allocate(a.shape, a.dtype)
    torch.add(a, b, out=block)
    total = block.sum()
    pool.deallocate(block)
    return total


def branches(pool, x, fresh):
    block = pool.allocate(x.shape, x.dtype)
    if fresh:
        block.zero_()
    block += x
    out = block.clone()
    pool.deallocate(block)
    return out


class Mixed:
    def _allocate_tensor(self, shape, dtype, device, zero_init=True): ...

    def _deallocate_tensor(self, tensor): ...

    def cleared_by_default(self, x):
        work = self._allocate_tensor(x.shape, x.dtype, x.device)
        work += x
        out = work.clone()
        self._deallocate_tensor(work)
        return out

    def uncleared_by_wish(self, x):
        work = self._allocate_tensor(x.shape, x.dtype, x.device, zero_init=False)
        work += x
        out = work.clone()
        self._deallocate_tensor(work)
        return out


def scaled(pool, x):
    out = pool.allocate(x.shape, x.dtype)
    out.copy_(x)
    out = out / 2
    pool.deallocate(out)
    return None


def scaled_in_place(pool, x):
    out = pool.allocate(x.shape, x.dtype)
    out.copy_(x)
    out /= 2
    pool.deallocate(out)
    return None


def foreign(pool, n):
    scratch = torch.empty(n)
    scratch.fill_(1)
    total = scratch.sum()
    pool.deallocate(scratch)
    return total


def either(pool, n, use_pool):
    scratch = pool.allocate((n,), torch.float32) if use_pool else torch.empty(n)
    scratch.fill_(1)
    total = scratch.sum()
    if use_pool:
        pool.deallocate(scratch)
    return total


def either_careless(pool, n, use_pool):
    scratch = pool.allocate((n,), torch.float32) if use_pool else torch.empty(n)
    scratch.fill_(1)
    total = scratch.sum()
    pool.deallocate(scratch)
    return total


def _finish(pool, buffer):
    pool.deallocate(buffer)


def finishes_foreign(pool, x):
    doubled = x.clone()
    _finish(pool, doubled)
    return x


def _end(pool, buffer):
    pool.deallocate(buffer)


def ends_lease(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    _end(pool, work)
    return x


def contiguous_copy(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    clone = work.transpose(0, 1).clone()
    pool.deallocate(clone)
    pool.deallocate(work)
    return None
