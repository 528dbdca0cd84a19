"""Attention workspaces: a pool, a lease object around it, and planners on top."""
from __future__ import annotations

import logging
from functools import partial
from typing import Callable, Optional

import torch

logger = logging.getLogger(__name__)


class WorkspacePool:
    """Byte tensors by power of two. Grows when a bucket is empty."""

    def __init__(self, buckets: dict[int, int]) -> None:
        self._buckets = {size: [torch.empty(size, dtype=torch.uint8) for _ in range(n)] for size, n in buckets.items()}
        self.lent = 0

    def get_buffer(self, nbytes: int) -> torch.Tensor:
        for size in sorted(self._buckets):
            if size >= nbytes and self._buckets[size]:
                self.lent += 1
                return self._buckets[size].pop()  # clean: returned
        raise MemoryError(f"no workspace of {nbytes} bytes")

    def put_buffer(self, buf: torch.Tensor) -> None:
        self.lent -= 1
        self._buckets[buf.numel()].append(buf)

    def shrink(self, size: int) -> int:
        """Split the idle buffers of a bucket into two halves each."""
        half = self._buckets.setdefault(size // 2, [])
        done = 0
        while self._buckets[size]:
            big = self._buckets[size].pop()  # clean: near miss, it goes on as two halves in the smaller bucket
            half.extend(part.clone() for part in big.chunk(2))
            done += 1
        return done


class Lease:
    """Closes back to the pool, unless it only refers to someone else's buffer."""

    def __init__(self, pool: WorkspacePool, buf: torch.Tensor, owns: bool = True) -> None:
        self.pool = pool
        self.buf: Optional[torch.Tensor] = buf
        self.owns = owns

    def close(self) -> None:
        buf, self.buf = self.buf, None
        if buf is None or not self.owns:
            return
        self.pool.put_buffer(buf)

    def __enter__(self) -> torch.Tensor:
        return self.buf

    def __exit__(self, *exc) -> None:
        self.close()


def lease(pool: WorkspacePool, nbytes: int, given: Optional[torch.Tensor] = None) -> Lease:
    """A lease on ``given`` if that is large enough, else on a pooled buffer."""
    if given is not None and given.numel() >= nbytes:
        return Lease(pool, given, owns=False)
    return Lease(pool, pool.get_buffer(nbytes))  # clean: handed to the caller inside an owning lease


def lease_pair(pool: WorkspacePool, nbytes: int) -> tuple[Lease, Lease]:
    keys = lease(pool, nbytes)  # clean: first of the returned pair
    values = lease(pool, nbytes)  # clean: second of the returned pair
    return keys, values


class Planner:
    """Chooses split sizes for decode attention."""

    def __init__(self, pool: WorkspacePool, bytes_per_split: int) -> None:
        self.pool = pool
        self.bytes_per_split = bytes_per_split
        self._by_batch: dict[int, Lease] = {}
        self._on_finish: list[Callable[[], None]] = []
        self._partials: Optional[Lease] = None

    def plan(self, lens: torch.Tensor, scratch: Optional[torch.Tensor] = None) -> int:
        with lease(self.pool, lens.numel() * 8, scratch) as buf:  # clean: near miss, owned only if taken, __exit__ closes it
            work = buf[: lens.numel() * 8].view(torch.int64)
            torch.cumsum(lens, 0, out=work)
            if int(work[-1]) == 0:
                return 0
            return max(1, int(work[-1]) // 256)

    def run_split(self, num_splits: int, kernel: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        tmp = Lease(self.pool, self.pool.get_buffer(num_splits * self.bytes_per_split), owns=False)  # leak: the lease does not own, so its close returns early
        try:
            return kernel(tmp.buf)
        finally:
            tmp.close()

    def run_kv(self, nbytes: int, kernel: Callable[..., torch.Tensor]) -> torch.Tensor:
        keys, values = lease_pair(self.pool, nbytes)  # clean: both closed below
        out = kernel(keys.buf, values.buf)
        for part in (keys, values):
            part.close()
        return out

    def run_keys_only(self, nbytes: int, kernel: Callable[..., torch.Tensor]) -> torch.Tensor:
        keys, _ = lease_pair(self.pool, nbytes)  # leak: the second lease of the pair is never closed
        out = kernel(keys.buf)
        keys.close()
        return out

    def for_batch(self, batch: int) -> Lease:
        """A lease kept for each batch size."""
        found = self._by_batch.get(batch)
        if found is None:
            found = lease(self.pool, batch * self.bytes_per_split)  # leak: trim pops entries of the table without closing them
            self._by_batch[batch] = found
        return found

    def trim(self, keep: int) -> None:
        while len(self._by_batch) > keep:
            batch, _ = self._by_batch.popitem()
            logger.debug("workspace for batch %d trimmed", batch)

    def deferred(self, nbytes: int) -> torch.Tensor:
        """A buffer that lives until ``finish``."""
        buf = self.pool.get_buffer(nbytes)  # clean: near miss, the partial in the finish list puts it back
        self._on_finish.append(partial(self.pool.put_buffer, buf))
        return buf

    def partials(self, nbytes: int) -> torch.Tensor:
        """The buffer of split results, enlarged on demand."""
        cur = self._partials
        if cur is None or cur.buf.numel() < nbytes:
            if cur is not None:
                cur.close()
            self._partials = lease(self.pool, nbytes)  # clean: near miss, the smaller one was closed, close does the last
        return self._partials.buf

    def finish(self) -> None:
        while self._on_finish:
            self._on_finish.pop()()

    def close(self) -> None:
        self.finish()
        for found in self._by_batch.values():
            found.close()
        self._by_batch.clear()
        if self._partials is not None:
            self._partials.close()
            self._partials = None


def regrow(pool: WorkspacePool, held: list[Lease], nbytes: int) -> None:
    """Make every lease of the list at least ``nbytes`` large."""
    for i, cur in enumerate(held):
        if cur.buf is not None and cur.buf.numel() >= nbytes:
            continue
        held[i] = lease(pool, nbytes)  # leak: the smaller lease in that place is overwritten unclosed


def merge_states(pool: WorkspacePool, parts: list[torch.Tensor], lse: list[float], out: Optional[Lease] = None) -> torch.Tensor:
    """Weighted merge of split results, in ``out`` when the caller has one."""
    mine = out is None
    if mine:
        out = lease(pool, parts[0].numel() * 4)  # leak: the single-part return comes before the close of our own lease
    if len(parts) == 1:
        return parts[0]
    acc = out.buf[: parts[0].numel() * 4].view(torch.float32)
    acc.zero_()
    for part, weight in zip(parts, torch.softmax(torch.tensor(lse), 0)):
        acc += weight * part.flatten()
    result = acc.clone()
    if mine:
        out.close()
    return result
