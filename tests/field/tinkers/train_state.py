"""Training state of the Foundry stack: shard writers, flat buckets, stashes, permits, gathered params."""
from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

try:
    import torch
except ImportError:
    torch = None


class FlatBuffer:
    """Stand-in for a flat tensor where torch is absent."""

    def __init__(self, numel: int) -> None:
        self.data = bytearray(4 * numel)
        self._numel = numel

    def numel(self) -> int:
        return self._numel

    def data_ptr(self) -> int:
        return id(self.data)


class ShardWriters:
    """Writers of checkpoint shards. The file system takes only so many open at once."""

    def __init__(self, directory: str, at_once: int) -> None:
        self._directory = directory
        self._slots = threading.Semaphore(at_once)
        self._open: Dict[int, object] = {}

    def open_shard(self, rank: int):
        self._slots.acquire()
        writer = open(f"{self._directory}/shard-{rank:05d}.bin", "wb")
        self._open[rank] = writer
        return writer

    def seal_shard(self, rank: int) -> int:
        writer = self._open.pop(rank)
        size = writer.tell()
        writer.close()
        self._slots.release()
        return size


def save_rank(writers: ShardWriters, rank: int, state) -> int:
    writer = writers.open_shard(rank)  # leak: a frozen rank returns 0 with its shard open
    if state.frozen:
        return 0
    for tensor in state.tensors():
        writer.write(tensor.tobytes())
    return writers.seal_shard(rank)


def save_ranks(writers: ShardWriters, states: Dict[int, object]) -> int:
    total = 0
    for rank, state in states.items():
        if state.frozen:
            continue
        writer = writers.open_shard(rank)  # clean: sealed in finally
        try:
            for tensor in state.tensors():
                writer.write(tensor.tobytes())
        finally:
            total += writers.seal_shard(rank)
    return total


class BucketPool:
    """Flat gradient buckets by size. A bucket is known again by its data pointer."""

    def __init__(self, cap_numel: int) -> None:
        self._cap = cap_numel
        self._outside = 0
        self._idle: Dict[int, list] = defaultdict(list)
        self._lent: Dict[int, int] = {}

    def lend(self, numel: int):
        if self._outside + numel > self._cap:
            return None
        if self._idle[numel]:
            flat = self._idle[numel].pop()
        elif torch is not None:
            flat = torch.empty(numel)
        else:
            flat = FlatBuffer(numel)
        self._outside += numel
        self._lent[flat.data_ptr()] = numel
        return flat

    def reclaim(self, flat) -> None:
        numel = self._lent.pop(flat.data_ptr())
        self._outside -= numel
        self._idle[numel].append(flat)


def reduce_grads(buckets: BucketPool, grads, comm) -> bool:
    numel = sum(g.numel() for g in grads)
    flat = buckets.lend(numel)  # leak: an overflow found after the flatten returns False with the bucket lent
    if flat is None:
        return comm.reduce_each(grads)
    comm.flatten(grads, flat)
    if comm.overflowed(flat):
        return False
    comm.all_reduce(flat)
    comm.unflatten(flat, grads)
    buckets.reclaim(flat)
    return True


class Overlap:
    """Reduces one bucket while the next fills."""

    def __init__(self, buckets: BucketPool, comm) -> None:
        self.buckets = buckets
        self.comm = comm
        self.in_flight: Optional[tuple] = None

    def submit(self, grads) -> None:
        flat = self.buckets.lend(sum(g.numel() for g in grads))  # clean: near miss, kept with its work and reclaimed by settle
        if flat is None:
            raise MemoryError("bucket cap")
        self.settle()
        self.comm.flatten(grads, flat)
        self.in_flight = (self.comm.all_reduce_async(flat), flat)

    def settle(self) -> None:
        if self.in_flight is None:
            return
        work, flat = self.in_flight
        work.wait()
        self.buckets.reclaim(flat)
        self.in_flight = None


class OverlapTwo:
    def __init__(self, buckets: BucketPool, comm) -> None:
        self.buckets = buckets
        self.comm = comm
        self.work = None
        self.flat = None

    def submit(self, grads) -> None:
        self.flat = self.buckets.lend(sum(g.numel() for g in grads))  # leak: each submit of a step overwrites the bucket in flight, only the last is reclaimed
        self.work = self.comm.all_reduce_async(self.flat)

    def step(self, groups) -> None:
        for grads in groups:
            self.submit(grads)
        self.settle()

    def settle(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.buckets.reclaim(self.flat)
            self.work = self.flat = None


class ActivationStash:
    """Activations moved off the GPU between forward and backward; a key takes its tensor out again."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._cells: Dict[int, Tuple[object, int]] = {}
        self._next_key = 0

    def tuck(self, tensor, nbytes: int) -> int:
        if self._bytes + nbytes > self._limit:
            return -1
        self._next_key += 1
        self._cells[self._next_key] = (tensor, nbytes)
        self._bytes += nbytes
        return self._next_key

    def untuck(self, key: int):
        tensor, nbytes = self._cells.pop(key)
        self._bytes -= nbytes
        return tensor


class SavedTensor:
    """Pack and unpack hooks for one tensor, backward runs once."""

    def __init__(self, stash: ActivationStash, tensor, nbytes: int) -> None:
        self.stash = stash
        self.kept = None
        self.key = stash.tuck(tensor, nbytes)  # clean: near miss, -1 holds nothing and else unpack takes it out
        if self.key < 0:
            self.kept = tensor

    def unpack(self):
        if self.key < 0:
            return self.kept
        return self.stash.untuck(self.key)


def checkpointed(stash: ActivationStash, fn, x, nbytes: int, needs_grad: bool):
    key = stash.tuck(x, nbytes)  # leak: without gradient the output goes out and the key is forgotten
    y = fn(x)
    if not needs_grad:
        return y, None
    return y, key


def replay(stash: ActivationStash, segments, loss_fn) -> float:
    keys = []
    for segment in segments:
        keys.append(stash.tuck(segment.x, segment.nbytes))  # leak: the backward stops at a non-finite loss and leaves the earlier keys tucked
        segment.forward()
    loss = 0.0
    while keys:
        loss = loss_fn(stash.untuck(keys.pop()))
        if loss != loss:
            break
    return loss


class MicroPermits:
    """How many micro batches a pipeline stage may have in flight."""

    def __init__(self, depth: int) -> None:
        self._gate = threading.BoundedSemaphore(depth)
        self.peak = 0
        self._now = 0

    def acquire(self) -> None:
        self._gate.acquire()
        self._now += 1
        self.peak = max(self.peak, self._now)

    def release(self) -> None:
        self._now -= 1
        self._gate.release()


def stage_forward(permits: MicroPermits, stage, micro_batches) -> List:
    outs = []
    for mb in micro_batches:
        permits.acquire()  # leak: an empty micro batch is skipped after its permit is taken
        if mb.empty:
            continue
        outs.append(stage.forward(mb))
        permits.release()
    return outs


class StageLoop:
    def __init__(self, permits: MicroPermits, stage) -> None:
        self.permits = permits
        self.stage = stage

    def inject(self, mb) -> None:
        self.permits.acquire()  # clean: released by the callback when the backward is done
        self.stage.submit(mb, on_backward=self._backward_done)

    def _backward_done(self, _mb) -> None:
        self.permits.release()


@dataclass
class GatheredParam:
    name: str
    full: object


class ParamGather:
    """Sharded parameters, made whole for a module and then partitioned again; nested uses are counted."""

    def __init__(self, comm) -> None:
        self._comm = comm
        self._whole: Dict[str, GatheredParam] = {}
        self._uses: Dict[str, int] = defaultdict(int)

    def make_whole(self, name: str) -> GatheredParam:
        if self._uses[name] == 0:
            self._whole[name] = GatheredParam(name, self._comm.all_gather(name))
        self._uses[name] += 1
        return self._whole[name]

    def partition(self, param: GatheredParam) -> None:
        self._uses[param.name] -= 1
        if self._uses[param.name] == 0:
            del self._whole[param.name]


def forward_module(gather: ParamGather, module, x):
    params = [gather.make_whole(n) for n in module.names]  # clean: all partitioned in finally
    try:
        return module.forward(x, *[p.full for p in params])
    finally:
        for param in params:
            gather.partition(param)


def grad_norm(gather: ParamGather, names: List[str], limit: float) -> float:
    total = 0.0
    for name in names:
        param = gather.make_whole(name)  # leak: the break at the limit leaves the last parameter whole
        total += float(param.full.norm()) ** 2
        if total > limit:
            break
        gather.partition(param)
    return total ** 0.5


def tied_weights(gather: ParamGather, a: str, b: str) -> bool:
    left = gather.make_whole(a)  # leak: a missing b returns False before the left one is partitioned
    if not b:
        return False
    right = gather.make_whole(b)  # clean: partitioned after the compare
    same = left.full is right.full
    gather.partition(right)
    gather.partition(left)
    return same


class LossHistory:
    """A window of losses for the log line."""

    def __init__(self, window: int = 100) -> None:
        self._values: List[float] = []
        self._window = window

    def add(self, loss: float) -> float:
        self._values.append(loss)
        del self._values[:-self._window]
        return sum(self._values) / len(self._values)

    def remove_last(self) -> None:
        if self._values:
            self._values.pop()


def log_losses(history: LossHistory, losses, log) -> None:
    for loss in losses:
        mean = history.add(loss)  # clean: a statistic
        if mean != mean:
            return
        log(mean)
