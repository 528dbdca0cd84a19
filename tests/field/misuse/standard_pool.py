"""Users of the standard pool and mixin, whose source is not in this tree."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from reference_modules.mixin import MemoryPoolMixin
from reference_modules.pool import TensorPool, get_global_memory_pool


class M(MemoryPoolMixin, nn.Module):
    def __init__(self, dim, enable_memory_pool=False):
        super().__init__()
        self._init_memory_pool(enable_memory_pool)
        self.w = nn.Parameter(torch.ones(dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        work = self._allocate_tensor(x.shape, x.dtype, x.device)
        work.copy_(x)
        y = self.norm(work)
        self._deallocate_tensor(work)
        return y

    def twice(self, x):
        work = self._allocate_tensor(x.shape, x.dtype, x.device)
        self._deallocate_tensor(work)
        self._deallocate_tensor(work)

    def after(self, x):
        work = self._allocate_tensor(x.shape, x.dtype, x.device)
        self._deallocate_tensor(work)
        return x + work

    def leased(self, x):
        with self._lease_tensor(x.shape, x.dtype, x.device) as work:
            work.copy_(x)
            out = work.unsqueeze(0)
        return out

    def uncleared(self, x):
        work = self._allocate_tensor(x.shape, x.dtype, x.device, zero_init=False)
        out = work + x
        self._deallocate_tensor(work)
        return out.detach()

    def cleared_ok(self, x):
        work = self._allocate_tensor(x.shape, x.dtype, x.device)
        out = work + x
        self._deallocate_tensor(work)
        return out

    def foreign(self, x):
        y = torch.empty_like(x)
        self._deallocate_tensor(y)


def global_pool(x):
    pool = get_global_memory_pool()
    t = pool.allocate(x.shape)
    pool.deallocate(t)
    pool.deallocate(t)


def global_inline(x):
    t = get_global_memory_pool().allocate(x.shape)
    t.add_(x)
    get_global_memory_pool().deallocate(t)


def two_devices(x):
    cpu_pool = TensorPool("cpu")
    gpu_pool = TensorPool("cuda")
    t = cpu_pool.allocate(x.shape)
    gpu_pool.deallocate(t)


def two_more(x):
    a = TensorPool("cpu")
    b = TensorPool("cuda")
    t = a.allocate(x.shape)
    b.deallocate(t)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = TensorPool("cpu")
        self.staging = TensorPool("cpu")

    def f(self, x):
        t = self.pool.allocate(x.shape)
        self.staging.deallocate(t)


def param_release(pool: TensorPool, t):
    pool.deallocate(t)
    t.zero_()


def cond(pool: TensorPool, x, flag):
    t = pool.allocate(x.shape)
    t.copy_(x)
    if flag:
        pool.deallocate(t)
    return t.sum()


def view_cond(pool: TensorPool, x, flag):
    t = pool.allocate(x.shape)
    t.copy_(x)
    v = t[0]
    if flag:
        pool.deallocate(t)
        return v
    s = v.sum()
    pool.deallocate(t)
    return s


def exp_chain(pool: TensorPool, x):
    t = pool.allocate(x.shape)
    t.copy_(x)
    t.exp_()
    y = t.sum()
    pool.deallocate(t)
    return y


def copy_async(pool: TensorPool, x):
    t = pool.allocate(x.shape)
    t.copy_(x, non_blocking=True)
    pool.deallocate(t)


def as_float(pool: TensorPool, x, w):
    t = pool.allocate(x.shape)
    t.copy_(x)
    y = F.linear(t.float(), w)
    pool.deallocate(t)
    return y


def eval_only(pool: TensorPool, model, x, w):
    model.eval()
    with torch.inference_mode():
        t = pool.allocate(x.shape)
        t.copy_(x)
        y = F.linear(t, w)
        pool.deallocate(t)
    return y
