"""Idioms around a pool whose body is in sight: closures, tuples, streams, inheritance."""

import asyncio
from contextlib import ExitStack, contextmanager, closing
import torch
import torch.nn as nn
import torch.distributed as dist
import threading


class Pool:
    def __init__(self):
        self._free = []
        self._used = {}

    def allocate(self, shape, dtype=torch.float32, zero=False) -> torch.Tensor:
        t = self._free.pop() if self._free else torch.empty(shape, dtype=dtype)
        self._used[id(t)] = t
        if zero:
            t.zero_()
        return t

    def deallocate(self, t: torch.Tensor) -> None:
        del self._used[id(t)]
        self._free.append(t)


def finally_and_body(pool: Pool, x):
    buf = pool.allocate(x.shape)
    try:
        buf.copy_(x)
        pool.deallocate(buf)
    finally:
        pool.deallocate(buf)


def in_while(pool: Pool, x):
    buf = pool.allocate(x.shape)
    n = 0
    while n < 3:
        n += 1
        pool.deallocate(buf)


async def in_async(pool: Pool, x):
    buf = pool.allocate(x.shape)
    await asyncio.sleep(0)
    pool.deallocate(buf)
    await asyncio.sleep(0)
    pool.deallocate(buf)


def in_dict(pool: Pool, x):
    buf = pool.allocate(x.shape)
    d = {"a": buf}
    pool.deallocate(d["a"])
    pool.deallocate(buf)


def in_list_loop(pool: Pool, x):
    a = pool.allocate(x.shape)
    b = pool.allocate(x.shape)
    for t in (a, b):
        pool.deallocate(t)
    pool.deallocate(a)


def by_closure(pool: Pool, x):
    buf = pool.allocate(x.shape)

    def cleanup():
        pool.deallocate(buf)

    cleanup()
    pool.deallocate(buf)


def by_stack(pool: Pool, x):
    with ExitStack() as stack:
        buf = pool.allocate(x.shape)
        stack.callback(pool.deallocate, buf)
        buf.copy_(x)
        pool.deallocate(buf)


class Base:
    def __init__(self, pool: Pool):
        self.pool = pool
        self.buf = pool.allocate((4,))

    def close(self):
        self.pool.deallocate(self.buf)


class Child(Base):
    def close(self):
        super().close()
        self.pool.deallocate(self.buf)


def numpy_alias(pool: Pool, x):
    buf = pool.allocate(x.shape)
    arr = buf.numpy()
    pool.deallocate(buf)
    arr[0] = 1


def tuple_return(pool: Pool, x):
    buf = pool.allocate(x.shape)
    buf.copy_(x)
    pool.deallocate(buf)
    return x, buf


def swap_names(pool: Pool, x):
    a = pool.allocate(x.shape)
    b = x
    a, b = b, a
    pool.deallocate(b)
    return b.sum()


def swap_names_ok(pool: Pool, x):
    a = pool.allocate(x.shape)
    b = x
    a, b = b, a
    pool.deallocate(b)
    return a.sum()


@contextmanager
def lent_view_ok(pool: Pool, x):
    buf = pool.allocate(x.shape)
    try:
        yield buf[:2]
    finally:
        pool.deallocate(buf)


def generator_ok(pool, xs):
    with pool.lease(xs[0].shape) as buf:
        for x in xs:
            buf.copy_(x)
            yield buf.view(-1)


def stored_in_arg(pool: Pool, x, out):
    buf = pool.allocate(x.shape)
    buf.copy_(x)
    out["head"] = buf[:2]
    pool.deallocate(buf)


def appended_to_arg(pool: Pool, x, outs):
    buf = pool.allocate(x.shape)
    buf.copy_(x)
    outs.append(buf[:2])
    pool.deallocate(buf)


def pools_in_dict(pools, x):
    a = pools["cpu_pool"].allocate(x.shape)
    a.copy_(x)
    pools["gpu_pool"].deallocate(a)


def mm_unwritten(pool: Pool, x):
    buf = pool.allocate((4, 4))
    y = torch.mm(buf, x)
    pool.deallocate(buf)
    return y.sum()


def if_written(pool: Pool, x, go):
    buf = pool.allocate((4, 4))
    if go:
        buf.copy_(x)
    y = buf.sum()
    pool.deallocate(buf)
    return y


def stream_use(pool: Pool, x, s):
    buf = pool.allocate(x.shape)
    buf.copy_(x)
    with torch.cuda.stream(s):
        y = buf + 1
    pool.deallocate(buf)
    return y


def stream_synced_ok(pool: Pool, x, s):
    buf = pool.allocate(x.shape)
    buf.copy_(x)
    with torch.cuda.stream(s):
        x.copy_(buf)
    s.synchronize()
    pool.deallocate(buf)


class Attn(nn.Module):
    def __init__(self, pool: Pool):
        super().__init__()
        self.pool = pool
        self.q = nn.Linear(4, 4)

    def forward(self, x):
        scores = self.pool.allocate((4, 4))
        torch.matmul(x, x, out=scores)
        probs = scores.softmax(-1)
        out = probs @ self.q(x)
        self.pool.deallocate(scores)
        return out

    def forward2(self, x, v):
        scores = self.pool.allocate((4, 4))
        scores.copy_(x @ x.T)
        out = scores @ v
        self.pool.deallocate(scores)
        return out

    def forward3(self, x, v):
        scores = self.pool.allocate((4, 4))
        scores.copy_(x @ x.T)
        y = scores.square()
        self.pool.deallocate(scores)
        return y.sum()


def module_out(pool: Pool, x):
    lin = nn.Linear(4, 4)
    y = lin(x)
    pool.deallocate(y)


def plus_one(pool: Pool, x):
    y = x + 1
    pool.deallocate(y)


def released_in_thread_ok(pool: Pool, x):
    buf = pool.allocate(x.shape)
    t = threading.Thread(target=pool.deallocate, args=(buf,))
    t.start()


def optional_release_ok(pool: Pool, x, keep):
    buf = pool.allocate(x.shape)
    buf.copy_(x)
    if not keep:
        pool.deallocate(buf)
    return buf.sum() if keep else None


def early_continue_ok(pool: Pool, xs):
    for x in xs:
        buf = pool.allocate(x.shape)
        buf.copy_(x)
        if x.sum() > 0:
            pool.deallocate(buf)
            continue
        buf.mul_(2)
        pool.deallocate(buf)


def flag_ok(pool: Pool, x):
    buf = pool.allocate(x.shape)
    done = False
    try:
        buf.copy_(x)
        pool.deallocate(buf)
        done = True
    finally:
        if not done:
            pool.deallocate(buf)


def reduce_scatter(pool: Pool, x):
    buf = pool.allocate(x.shape)
    buf.copy_(x)
    work = dist.reduce_scatter_tensor(x, buf, async_op=True)
    pool.deallocate(buf)
    work.wait()
