"""Flat-parameter unsharding for a fully sharded data parallel wrapper.

Every wrapped block owns one flat shard. Before the block runs, the shards of all ranks are gathered into a
bucket taken from FlatBucketPool; after it has run, the bucket goes back so that the next block can use it.
"""
from __future__ import annotations

import collections
import logging
import threading

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class FlatBucketPool:
    """All-gather destinations of one size, shared by the blocks of a model."""

    def __init__(self, numel: int, depth: int, dtype=torch.bfloat16, device: str = "cuda"):
        self.numel = numel
        self._lock = threading.Lock()
        self._free = collections.deque(torch.empty(numel, dtype=dtype, device=device) for _ in range(depth))
        self._live: dict[int, str] = {}

    def borrow(self, tag: str) -> torch.Tensor:
        with self._lock:
            if not self._free:
                raise RuntimeError(f"no flat bucket left for {tag}; live: {sorted(self._live.values())}")
            buf = self._free.popleft()
            self._live[buf.data_ptr()] = tag
            return buf

    def try_borrow(self, tag: str) -> torch.Tensor | None:
        with self._lock:
            if not self._free:
                return None
            buf = self._free.popleft()
            self._live[buf.data_ptr()] = tag
            return buf

    def hand_back(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._live.pop(buf.data_ptr(), None)
            self._free.append(buf)


class FlatHandle:
    def __init__(self, name: str, shard: torch.Tensor, true_numel: int, pool: FlatBucketPool):
        self.name = name
        self.shard = shard
        self.true_numel = true_numel
        self.pool = pool
        self.full: torch.Tensor | None = None
        self.ahead: torch.Tensor | None = None
        self.ahead_work = None
        self.grad_full: torch.Tensor | None = None

    def prefetch(self) -> None:
        if self.full is not None or self.ahead is not None:
            return
        buf = self.pool.try_borrow(self.name + ".ahead")  # clean: near miss, becomes full, reshard ends it
        if buf is None:
            return
        self.ahead = buf
        self.ahead_work = dist.all_gather_into_tensor(buf, self.shard, async_op=True)

    def unshard(self) -> None:
        if self.full is not None:
            return
        if self.ahead is not None:
            self.ahead_work.wait()
            self.full, self.ahead, self.ahead_work = self.ahead, None, None
            return
        buf = self.pool.borrow(self.name)  # clean: kept in self.full, reshard gives it back
        dist.all_gather_into_tensor(buf, self.shard)
        self.full = buf

    def reshard(self) -> None:
        if self.full is None:
            return
        full, self.full = self.full, None
        self.pool.hand_back(full)

    def prepare_backward(self) -> None:
        self.grad_full = self.pool.borrow(self.name + ".grad")  # leak: post_backward only sets it to None
        self.grad_full.zero_()

    def post_backward(self, world: int) -> None:
        out = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(out, self.grad_full)
        self.shard.grad = out.div_(world)
        self.grad_full = None


def gathered(h: FlatHandle, pool: FlatBucketPool) -> torch.Tensor:
    """The whole flat parameter in a bucket of the pool; the caller returns the bucket."""
    buf = pool.borrow(h.name + ".export")  # clean: handed to the caller
    dist.all_gather_into_tensor(buf, h.shard)
    return buf


def export_state(handles: list[FlatHandle], pool: FlatBucketPool) -> dict[str, torch.Tensor]:
    state = {}
    for h in handles:
        flat = gathered(h, pool)  # leak: copied to the host, the bucket itself is dropped
        state[h.name] = flat[: h.true_numel].cpu()
    return state


def export_state_rank0(handles: list[FlatHandle], pool: FlatBucketPool) -> dict[str, torch.Tensor]:
    state = {}
    rank0 = dist.get_rank() == 0
    for h in handles:
        flat = gathered(h, pool)  # clean: handed back on every rank after the copy
        if rank0:
            state[h.name] = flat[: h.true_numel].cpu()
        pool.hand_back(flat)
    return state


def clip_grad_norm(handles: list[FlatHandle], pool: FlatBucketPool, max_norm: float) -> float:
    """Global norm over the shards; scaled copies are made in a bucket to keep the accumulation in fp32."""
    total = 0.0
    for h in handles:
        scratch = pool.borrow(h.name + ".norm")  # leak: the frozen-shard continue skips hand_back
        grad = h.shard.grad
        if grad is None:
            continue
        view = scratch[: grad.numel()]
        view.copy_(grad)
        total += float(view.float().pow(2).sum())
        pool.hand_back(scratch)
    norm = total ** 0.5
    scale = max_norm / (norm + 1e-6)
    if scale < 1.0:
        for h in handles:
            if h.shard.grad is not None:
                h.shard.grad.mul_(scale)
    return norm


def reserve_exchange(pool: FlatBucketPool, tag: str):
    """Two buckets for an in-place layout change, or None when the step should be put off."""
    src = pool.try_borrow(tag + ".src")  # leak: lost when the second bucket is not to be had
    if src is None:
        return None
    dst = pool.try_borrow(tag + ".dst")  # clean: handed to the caller in the pair
    if dst is None:
        log.info("layout change of %s put off", tag)
        return None
    return src, dst


def reserve_triple(pool: FlatBucketPool, tag: str):
    got: list[torch.Tensor] = []
    for part in ("q", "k", "v"):
        buf = pool.try_borrow(f"{tag}.{part}")  # clean: near miss, rolled back or handed on
        if buf is None:
            for b in got:
                pool.hand_back(b)
            return None
        got.append(buf)
    return got


def fuse_qkv(h: FlatHandle, pool: FlatBucketPool, splits: tuple[int, int, int]) -> bool:
    parts = reserve_triple(pool, h.name)  # clean: None means nothing held, otherwise all three go back
    if parts is None:
        return False
    h.unshard()
    at = 0
    for buf, n in zip(parts, splits):
        buf[:n].copy_(h.full[at : at + n])
        at += n
    h.full[:at].copy_(torch.cat([b[:n] for b, n in zip(parts, splits)]))
    h.reshard()
    for buf in parts:
        pool.hand_back(buf)
    return True


def upcast_view(h: FlatHandle, pool: FlatBucketPool, loss_scale: float) -> None:
    """Rewrites the shard with the unscaled master values."""
    work = pool.borrow(h.name + ".cast")  # leak: rebound by the unscale branch
    work[: h.shard.numel()].copy_(h.shard)
    if loss_scale != 1.0:
        work = pool.borrow(h.name + ".unscale")  # clean: it is the one given back below
        work[: h.shard.numel()].copy_(h.shard).div_(loss_scale)
    h.shard.copy_(work[: h.shard.numel()])
    pool.hand_back(work)


def run_forward(handles: list[FlatHandle], blocks, x: torch.Tensor, keep_last: bool = True) -> torch.Tensor:
    last = len(handles) - 1
    for i, (h, block) in enumerate(zip(handles, blocks)):
        h.unshard()
        if i < last:
            handles[i + 1].prefetch()
        x = block(h.full, x)
        if i < last or not keep_last:
            h.reshard()
    return x


def run_backward(handles: list[FlatHandle], blocks, grad: torch.Tensor, world: int) -> torch.Tensor:
    for i in range(len(handles) - 1, -1, -1):
        h = handles[i]
        h.unshard()
        h.prepare_backward()
        if i > 0:
            handles[i - 1].prefetch()
        grad = blocks[i].backward(h.full, h.grad_full, grad)
        h.post_backward(world)
        h.reshard()
    return grad
