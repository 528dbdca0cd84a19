"""Staging buffers of a connector: copies in flight, views that are kept, pools that are mixed up."""

import torch
import torch.distributed as dist


class HostBuffers:
    def __init__(self, pool):
        self.pool = pool

    def upload(self, source, device):
        """After pytorch/pytorch#130785 and LMCache/LMCache#4830: the pinned source goes back mid-copy."""
        staging = self.pool.allocate(source.shape, source.dtype)
        staging.copy_(source)
        target = staging.to(device, non_blocking=True)
        self.pool.deallocate(staging)
        return target

    def upload_waiting(self, source, device):
        staging = self.pool.allocate(source.shape, source.dtype)
        staging.copy_(source)
        target = staging.to(device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        self.pool.deallocate(staging)
        return target

    def upload_blocking(self, source, device):
        staging = self.pool.allocate(source.shape, source.dtype)
        staging.copy_(source)
        target = staging.to(device)
        self.pool.deallocate(staging)
        return target

    def scatter(self, chunks, table):
        staging = self.pool.allocate(table.shape, table.dtype)
        for index, chunk in enumerate(chunks):
            staging[index].copy_(chunk)
        table.copy_(staging, non_blocking=True)
        self.pool.deallocate(staging)

    def scatter_with_event(self, table, event):
        staging = self.pool.allocate(table.shape, table.dtype)
        staging.zero_()
        table.copy_(staging, non_blocking=True)
        event.record()
        event.synchronize()
        self.pool.deallocate(staging)

    def on_side_stream(self, source, stream):
        """After meta-pytorch/torchrec#4231 and the notes of record_stream."""
        work = self.pool.allocate(source.shape, source.dtype)
        with torch.cuda.stream(stream):
            work.copy_(source)
            source.add_(work)
        self.pool.deallocate(work)

    def on_side_stream_recorded(self, source, stream):
        work = self.pool.allocate(source.shape, source.dtype)
        with torch.cuda.stream(stream):
            work.copy_(source)
            source.add_(work)
        work.record_stream(stream)
        self.pool.deallocate(work)

    def on_side_stream_joined(self, source, stream):
        work = self.pool.allocate(source.shape, source.dtype)
        with torch.cuda.stream(stream):
            work.copy_(source)
            source.add_(work)
        torch.cuda.current_stream().wait_stream(stream)
        self.pool.deallocate(work)

    def send(self, x, rank):
        outgoing = self.pool.allocate(x.shape, x.dtype)
        outgoing.copy_(x)
        handle = dist.isend(outgoing, rank)
        self.pool.deallocate(outgoing)
        handle.wait()

    def send_waiting(self, x, rank):
        outgoing = self.pool.allocate(x.shape, x.dtype)
        outgoing.copy_(x)
        handle = dist.isend(outgoing, rank)
        handle.wait()
        self.pool.deallocate(outgoing)

    def reduce(self, x):
        total = self.pool.allocate(x.shape, x.dtype)
        total.copy_(x)
        work = dist.all_reduce(total, async_op=True)
        x.mul_(2)
        self.pool.deallocate(total)
        work.wait()

    def reduce_now(self, x):
        total = self.pool.allocate(x.shape, x.dtype)
        total.copy_(x)
        dist.all_reduce(total)
        x.copy_(total)
        self.pool.deallocate(total)

    def gather(self, x, parts):
        flat = self.pool.allocate((parts, *x.shape), x.dtype)
        work = dist.all_gather_into_tensor(flat, x, async_op=True)
        if work is not None:
            work.wait()
        out = flat.sum(0)
        self.pool.deallocate(flat)
        return out


class ViewKeeper:
    def __init__(self, pool):
        self.pool = pool
        self.last = None
        self.history = []

    def rows(self, n, d):
        """After LMCache/LMCache#3610: a view outlives what it looks at."""
        block = self.pool.allocate((n, d), torch.float32)
        block.fill_(1.0)
        first = block[: n // 2]
        self.pool.deallocate(block)
        return first

    def rows_copied(self, n, d):
        block = self.pool.allocate((n, d), torch.float32)
        block.fill_(1.0)
        first = block[: n // 2].clone()
        self.pool.deallocate(block)
        return first

    def keep(self, n):
        block = self.pool.allocate((n,), torch.float32)
        block.zero_()
        flat = block.view(-1)
        self.pool.deallocate(block)
        self.last = flat

    def keep_sum(self, n):
        block = self.pool.allocate((n,), torch.float32)
        block.zero_()
        total = block.sum()
        self.pool.deallocate(block)
        self.last = total

    def remember(self, n):
        block = self.pool.allocate((n, n), torch.float32)
        block.zero_()
        try:
            column = block[:, 0]
            return column
        finally:
            self.pool.deallocate(block)

    def leased(self, n):
        with self.pool.lease((n, n), torch.float32) as block:
            block.zero_()
            return block.t()

    def leased_copy(self, n):
        with self.pool.lease((n, n), torch.float32) as block:
            block.zero_()
            return block.t().contiguous().sum()

    def collect(self, n):
        block = self.pool.allocate((n,), torch.float32)
        block.zero_()
        part = block.narrow(0, 0, 1)
        self.pool.deallocate(block)
        self.history.append(part)


class TwoPools:
    def __init__(self, make_pool):
        self.key_pool = make_pool("keys")
        self.value_pool = make_pool("values")

    def exchange(self, shape):
        keys = self.key_pool.allocate(shape, torch.float32)
        values = self.value_pool.allocate(shape, torch.float32)
        keys.copy_(values.zero_())
        self.value_pool.deallocate(keys)
        self.key_pool.deallocate(values)

    def straight(self, shape):
        keys = self.key_pool.allocate(shape, torch.float32)
        values = self.value_pool.allocate(shape, torch.float32)
        keys.copy_(values.zero_())
        self.key_pool.deallocate(keys)
        self.value_pool.deallocate(values)

    def chosen(self, shape, for_keys):
        pool = self.key_pool if for_keys else self.value_pool
        block = pool.allocate(shape, torch.float32)
        block.zero_()
        pool.deallocate(block)

    def renamed(self, shape):
        pool = self.key_pool
        block = pool.allocate(shape, torch.float32)
        block.zero_()
        self.key_pool.deallocate(block)


def move(source_pool, target_pool, shape):
    block = source_pool.allocate(shape, torch.float32)
    block.zero_()
    target_pool.deallocate(block)
