"""Host-to-device prefetcher for token shards with recycled pinned batches."""
from __future__ import annotations

import collections
import mmap
import random
import struct
import threading
from typing import Deque, Dict, Generator, Iterator, List, Optional, Sequence

import numpy as np
import torch


class PinnedBatch:
    """One recycled host batch. Goes back to its depot through `recycle()`."""

    def __init__(self, depot: "BatchDepot", shape: tuple):
        self.depot = depot
        self.tokens = torch.empty(shape, dtype=torch.int64).pin_memory()
        self.rows = 0

    def recycle(self) -> None:
        self.rows = 0
        self.depot._return(self)

    def __enter__(self) -> "PinnedBatch":
        return self

    def __exit__(self, exc_type, exc, tb) -> bool:
        self.recycle()
        return False


class BatchDepot:
    def __init__(self, n: int, batch: int, seqlen: int):
        self._cond = threading.Condition()
        self._idle: Deque[PinnedBatch] = collections.deque(PinnedBatch(self, (batch, seqlen)) for _ in range(n))

    def borrow(self, block: bool = True) -> Optional[PinnedBatch]:
        with self._cond:  # clean: with block
            while not self._idle:
                if not block:
                    return None
                self._cond.wait()
            return self._idle.popleft()  # clean: returned

    def _return(self, batch: PinnedBatch) -> None:
        with self._cond:  # clean: with block
            self._idle.append(batch)
            self._cond.notify()


class TokenShard:
    def __init__(self, path: str, seqlen: int):
        self.seqlen = seqlen
        self._fh = open(path, "rb")  # clean: closed in close()
        self._mm = mmap.mmap(self._fh.fileno(), 0, access=mmap.ACCESS_READ)  # clean: closed in close()
        self._tokens = np.frombuffer(self._mm, dtype=np.uint16)

    def __len__(self) -> int:
        return len(self._tokens) // self.seqlen

    def read_into(self, i: int, row: torch.Tensor) -> None:
        row.copy_(torch.from_numpy(self._tokens[i * self.seqlen : (i + 1) * self.seqlen].astype(np.int64)))

    def close(self) -> None:
        del self._tokens
        self._mm.close()
        self._fh.close()


def shard_length(path: str) -> int:
    """Number of tokens according to the index file next to the shard."""
    f = open(path + ".idx", "rb")  # leak: the old index format returns before the close
    version, count = struct.unpack("<II", f.read(8))
    if version == 1:
        return count
    (count,) = struct.unpack("<Q", f.read(8))
    f.close()
    return count


class Prefetcher:
    """Fills pinned batches in a background thread and copies them on a side stream."""

    def __init__(self, shards: Sequence[TokenShard], depot: BatchDepot, batch: int, device, seed: int = 0):
        self.shards = list(shards)
        self.depot = depot
        self.batch = batch
        self.device = device
        self.rng = random.Random(seed)
        self.ready: Deque[PinnedBatch] = collections.deque()
        self.held: Dict[int, PinnedBatch] = {}
        self.dropped = 0

    def _fill(self, pb: PinnedBatch) -> int:
        shard = self.rng.choice(self.shards)
        for r in range(self.batch):
            shard.read_into(self.rng.randrange(len(shard)), pb.tokens[r])
            pb.rows += 1
        return pb.rows

    def produce(self) -> bool:
        pb = self.depot.borrow(block=False)  # clean: near miss, only None returns early, otherwise queued for consume() or drain()
        if pb is None:
            return False
        self._fill(pb)
        self.ready.append(pb)
        return True

    def produce_filtered(self, pad_id: int, max_pad: float) -> bool:
        pb = self.depot.borrow()  # leak: a batch with too much padding is counted as dropped and not recycled
        self._fill(pb)
        if (pb.tokens == pad_id).float().mean().item() > max_pad:
            self.dropped += 1
            return False
        self.ready.append(pb)
        return True

    def consume(self) -> Optional[torch.Tensor]:
        if not self.ready:
            return None
        with self.ready.popleft() as pb:
            return pb.tokens[: pb.rows].to(self.device)

    def pin_for_eval(self, key: int) -> torch.Tensor:
        """The same batch for the same key until release_eval()."""
        if key not in self.held:
            pb = self.depot.borrow()  # clean: near miss, kept in held and recycled in release_eval()
            self._fill(pb)
            self.held[key] = pb
        return self.held[key].tokens

    def refresh_eval(self, key: int) -> torch.Tensor:
        pb = self.depot.borrow()  # leak: a batch pinned under the same key is overwritten
        self._fill(pb)
        self.held[key] = pb
        return pb.tokens

    def release_eval(self) -> None:
        for pb in self.held.values():
            pb.recycle()
        self.held.clear()

    def drain(self) -> None:
        while self.ready:
            self.ready.popleft().recycle()
        self.release_eval()


def iterate(shard: TokenShard, depot: BatchDepot, batch: int) -> Generator[torch.Tensor, None, None]:
    """Sequential pass, last partial batch included."""
    pb = depot.borrow()  # clean: near miss, recycled in the finally even if the consumer stops early
    try:
        for i in range(len(shard)):
            shard.read_into(i, pb.tokens[i % batch])
            if (i + 1) % batch == 0:
                yield pb.tokens
        rest = len(shard) % batch
        if rest:
            yield pb.tokens[:rest]
    finally:
        pb.recycle()


def interleave(shards: List[TokenShard], depot: BatchDepot, batch: int) -> Iterator[torch.Tensor]:
    for shard in shards:
        if len(shard) < batch:
            continue
        pb = depot.borrow()  # leak: recycled only after the last shard, the earlier ones are rebound
        for r in range(batch):
            shard.read_into(r, pb.tokens[r])
        yield pb.tokens.clone()
    else:
        if shards and len(shards[-1]) >= batch:
            pb.recycle()


def longest_shard(paths: List[str], seqlen: int) -> Optional[str]:
    best, best_len = None, 0
    for path in paths:
        shard = TokenShard(path, seqlen)  # leak: close is skipped for empty shards by the continue
        n = len(shard)
        if n == 0:
            continue
        if n > best_len:
            best, best_len = path, n
        shard.close()
    return best
