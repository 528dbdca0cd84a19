"""Offload of KV blocks from the device pool to host memory and back.

Device blocks are reference counted (prefix sharing), host blocks come from a bitmap, the
copy streams' staging tensors from a ring.
"""
import dataclasses
import logging
from typing import Dict, List, Optional

import numpy as np
import torch

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


class DeviceBlocks:
    def __init__(self, n: int, block_shape, device: str = "cuda"):
        self.data = torch.empty((n, *block_shape), device=device)
        self.ref = [0] * n
        self.free_ids = list(range(n - 1, -1, -1))
        self.by_hash: Dict[int, int] = {}

    def __len__(self):
        return len(self.free_ids)

    def alloc(self) -> int:
        if not self.free_ids:
            raise OutOfBlocks("device")
        b = self.free_ids.pop()  # clean: handed to the caller with one reference
        self.ref[b] = 1
        return b

    def alloc_n(self, n: int) -> List[int]:
        if len(self.free_ids) < n:
            raise OutOfBlocks("device")
        return [self.alloc() for _ in range(n)]  # clean: near miss, the length was checked, so none of them raises

    def share(self, b: int) -> int:
        self.ref[b] += 1
        return b

    def drop(self, b: int) -> None:
        self.ref[b] -= 1
        if self.ref[b] == 0:
            self.free_ids.append(b)

    def match(self, h: int) -> Optional[int]:
        b = self.by_hash.get(h)
        if b is None or self.ref[b] == 0:
            return None
        return self.share(b)  # clean: handed to the caller


class HostBlocks:
    def __init__(self, n: int, block_shape):
        self.data = torch.empty((n, *block_shape), pin_memory=torch.cuda.is_available())
        self.busy = np.zeros(n, dtype=bool)

    def find(self, n: int) -> Optional[np.ndarray]:
        idx = np.flatnonzero(~self.busy)[:n]
        if len(idx) < n:
            return None
        self.busy[idx] = True
        return idx

    def clear(self, idx) -> None:
        self.busy[idx] = False


class StagingRing:
    def __init__(self, depth: int, block_shape):
        self.slots = [torch.empty(block_shape) for _ in range(depth)]
        self.open = [True] * depth

    def next_slot(self) -> Optional[int]:
        for i, is_open in enumerate(self.open):
            if is_open:
                self.open[i] = False
                return i
        return None

    def done_slot(self, i: int) -> None:
        self.open[i] = True


@dataclasses.dataclass
class SeqKv:
    seq_id: int
    blocks: List[int] = dataclasses.field(default_factory=list)
    host: Optional[np.ndarray] = None
    pinned: bool = False


class Offloader:
    def __init__(self, dev: DeviceBlocks, host: HostBlocks, ring: StagingRing):
        self.dev = dev
        self.host = host
        self.ring = ring
        self.seqs: Dict[int, SeqKv] = {}

    # ---- sequences -----------------------------------------------------
    def begin(self, seq_id: int, hashes: List[int]) -> SeqKv:
        kv = SeqKv(seq_id)
        for h in hashes:
            b = self.dev.match(h)  # clean: near miss, kv.blocks is dropped when alloc runs out, else self.seqs holds it
            if b is None:
                try:
                    b = self.dev.alloc()  # clean: moved into kv.blocks
                except OutOfBlocks:
                    for x in kv.blocks:
                        self.dev.drop(x)
                    raise
                self.dev.by_hash[h] = b
            kv.blocks.append(b)
        self.seqs[seq_id] = kv
        return kv

    def append(self, kv: SeqKv) -> None:
        kv.blocks.append(self.dev.alloc())  # clean: moved into kv.blocks, which end drops

    def end(self, seq_id: int) -> None:
        kv = self.seqs.pop(seq_id)
        for b in kv.blocks:
            self.dev.drop(b)
        kv.blocks = []
        if kv.host is not None:
            self.host.clear(kv.host)
            kv.host = None

    def fork(self, parent: SeqKv, seq_id: int, max_blocks: int) -> Optional[SeqKv]:
        shared = [self.dev.share(b) for b in parent.blocks]  # leak: the references are kept when the parent is too long to fork
        if len(shared) > max_blocks:
            return None
        kv = SeqKv(seq_id, shared)
        self.seqs[seq_id] = kv
        return kv

    def cow(self, kv: SeqKv, i: int) -> int:
        """Gives the sequence its own copy of block i."""
        b = kv.blocks[i]
        if self.dev.ref[b] == 1:
            return b
        mine = self.dev.alloc()  # clean: near miss, takes b's place in kv.blocks and b is dropped
        self.dev.data[mine].copy_(self.dev.data[b])
        kv.blocks[i] = mine
        self.dev.drop(b)
        return mine

    def trim(self, kv: SeqKv, keep: int) -> None:
        while len(kv.blocks) > keep:
            self.dev.drop(kv.blocks.pop())

    # ---- offload -------------------------------------------------------
    def offload(self, kv: SeqKv) -> bool:
        if kv.host is not None:
            return True
        idx = self.host.find(len(kv.blocks))  # clean: near miss, moved into kv.host, which end or restore clears
        if idx is None:
            return False
        for h, b in zip(idx, kv.blocks):
            self.host.data[h].copy_(self.dev.data[b])
            self.dev.drop(b)
        kv.blocks = []
        kv.host = idx
        return True

    def offload_staged(self, kv: SeqKv) -> bool:
        if kv.host is not None:
            return True
        idx = self.host.find(len(kv.blocks))  # leak: stays busy when the ring has no slot
        if idx is None:
            return False
        slot = self.ring.next_slot()  # clean: done at the end of the copy
        if slot is None:
            logger.debug("staging ring is full")
            return False
        for h, b in zip(idx, kv.blocks):
            self.ring.slots[slot].copy_(self.dev.data[b])
            self.host.data[h].copy_(self.ring.slots[slot])
            self.dev.drop(b)
        self.ring.done_slot(slot)
        kv.blocks, kv.host = [], idx
        return True

    def restore(self, kv: SeqKv) -> bool:
        if kv.host is None:
            return True
        try:
            fresh = self.dev.alloc_n(len(kv.host))  # clean: moved into kv.blocks
        except OutOfBlocks:
            return False
        for b, h in zip(fresh, kv.host):
            self.dev.data[b].copy_(self.host.data[h])
        self.host.clear(kv.host)
        kv.host = None
        kv.blocks = fresh + kv.blocks
        return True

    def restore_prefix(self, kv: SeqKv, n: int, checks: Optional[List[float]] = None) -> int:
        done = 0
        for h in kv.host[:n]:
            b = self.dev.alloc()  # leak: not dropped when the checksum differs
            self.dev.data[b].copy_(self.host.data[h])
            if checks is not None and float(self.dev.data[b].sum()) != checks[done]:
                logger.error("seq %d: bad host block %d", kv.seq_id, h)
                break
            kv.blocks.append(b)
            done += 1
        return done

    def prefetch(self, seq_ids: List[int]) -> List[int]:
        ready = []
        for sid in seq_ids:
            slot = self.ring.next_slot()  # leak: `continue` for a sequence on the device keeps the slot
            if slot is None:
                break
            kv = self.seqs.get(sid)
            if kv is None or kv.host is None:
                continue
            self.ring.slots[slot].copy_(self.host.data[kv.host[0]])
            self.ring.done_slot(slot)
            ready.append(sid)
        return ready

    # ---- defragmentation and export ------------------------------------
    def first_block(self, h: int) -> Optional[torch.Tensor]:
        b = self.dev.match(h)  # leak: the matched block's reference is not dropped after the copy
        if b is None:
            return None
        return self.dev.data[b].clone()
