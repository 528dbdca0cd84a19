"""Tensors that are read, handed on or given back again after they went home."""

import torch


def read_after(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    pool.deallocate(work)
    return work.sum()


def read_before(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    total = work.sum()
    pool.deallocate(work)
    return total


def shape_after(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    pool.deallocate(work)
    return work.shape


def through_alias(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    same = work
    same.copy_(x)
    pool.deallocate(work)
    x.add_(same)


def through_view(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    rows = work.view(-1)
    pool.deallocate(work)
    x.view(-1).add_(rows)


def rebound(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    pool.deallocate(work)
    work = x
    return work.sum()


def set_to_none(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    pool.deallocate(work)
    work = None
    return work


def twice(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    pool.deallocate(work)
    pool.deallocate(work)


def twice_by_alias(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    other = work
    other.copy_(x)
    pool.deallocate(other)
    pool.deallocate(work)


def twice_by_branches(pool, x, early):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    if early:
        pool.deallocate(work)
    x.mul_(2)
    pool.deallocate(work)


def once_by_branches(pool, x, early):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    if early:
        pool.deallocate(work)
    x.mul_(2)
    if not early:
        pool.deallocate(work)


def handler_and_finally(pool, x):
    """After LMCache/LMCache#993: the cleanup of the failure and the cleanup of all."""
    work = pool.allocate(x.shape, x.dtype)
    try:
        work.copy_(x)
        return x.sum()
    except RuntimeError:
        pool.deallocate(work)
        raise
    finally:
        pool.deallocate(work)


def handler_or_end(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    try:
        work.copy_(x)
    except RuntimeError:
        pool.deallocate(work)
        raise
    pool.deallocate(work)
    return x.sum()


def _consume(pool, work):
    total = float(work.sum())
    pool.deallocate(work)
    return total


def caller_and_callee(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    total = _consume(pool, work)
    pool.deallocate(work)
    return total


def callee_only(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    return _consume(pool, work)


def callee_then_read(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    total = _consume(pool, work)
    return total + work.mean()


def leased_and_given_back(pool, shape):
    with pool.lease(shape, torch.float32) as work:
        work.zero_()
        pool.deallocate(work)


def leased_then_read(pool, shape):
    with pool.lease(shape, torch.float32) as work:
        work.zero_()
    return work.sum()


def leased_and_read(pool, shape):
    with pool.lease(shape, torch.float32) as work:
        work.zero_()
        total = work.sum()
    return total


def returned_after(pool, x):
    work = pool.allocate(x.shape, x.dtype)
    work.copy_(x)
    pool.deallocate(work)
    return work


def each_turn(pool, parts):
    for part in parts:
        work = pool.allocate(part.shape, part.dtype)
        work.copy_(part)
        pool.deallocate(work)


def all_of_them(pool, parts):
    held = [pool.allocate(part.shape, part.dtype) for part in parts]
    for work in held:
        pool.deallocate(work)
    held.clear()


def all_then_read(pool, parts):
    held = [pool.allocate(part.shape, part.dtype) for part in parts]
    for work in held:
        pool.deallocate(work)
    return torch.stack(held)


class Owner:
    def __init__(self, pool, shape):
        self.pool = pool
        self.buffer = pool.allocate(shape, torch.float32)
        self.spare = pool.allocate(shape, torch.float32)
        self.closed = False

    def flush(self):
        """After LMCache/LMCache#2772: one method ends it, and the cleanup ends it again."""
        self.pool.deallocate(self.buffer)

    def release_spare(self):
        if self.spare is not None:
            self.pool.deallocate(self.spare)
            self.spare = None

    def close(self):
        self.flush()
        self.pool.deallocate(self.buffer)
        self.release_spare()
        if self.spare is not None:
            self.pool.deallocate(self.spare)


class Refilled:
    def __init__(self, pool, shape):
        self.pool = pool
        self.shape = shape
        self.buffer = pool.allocate(shape, torch.float32)

    def swap(self):
        self.pool.deallocate(self.buffer)
        self._refill()
        return self.buffer.sum()

    def _refill(self):
        self.buffer = self.pool.allocate(self.shape, torch.float32)
        self.buffer.zero_()

    def stale(self):
        self.pool.deallocate(self.buffer)
        return self.buffer.sum()

    def close(self):
        self.pool.deallocate(self.buffer)
