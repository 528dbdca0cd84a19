"""Paged KV cache bookkeeping for a two-tier (GPU, CPU) block layout."""
from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field


class BlockPool:
    def __init__(self, num_blocks: int, device: str) -> None:
        self.device = device
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, bid: int) -> int:
        return self._refs[bid]

    def allocate(self) -> int | None:
        if not self._free:
            return None
        bid = self._free.popleft()
        self._refs[bid] = 1
        return bid

    def allocate_n(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        out: list[int] = []
        while len(out) < n:
            bid = self.allocate()  # clean: near miss, room was checked first and the list goes to the caller
            assert bid is not None
            out.append(bid)
        return out

    def share(self, bid: int) -> None:
        self._refs[bid] += 1

    def free(self, bid: int) -> None:
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            self._free.append(bid)


@dataclass
class Sequence:
    seq_id: int
    token_ids: list[int] = field(default_factory=list)

    def prefix_hashes(self, block_size: int) -> list[int]:
        full = len(self.token_ids) // block_size
        out, parent = [], 0
        for i in range(full):
            parent = hash((parent, *self.token_ids[i * block_size:(i + 1) * block_size]))
            out.append(parent)
        return out


class KVCacheManager:
    def __init__(self, gpu: BlockPool, cpu: BlockPool, block_size: int = 16) -> None:
        self.gpu = gpu
        self.cpu = cpu
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}
        self.swapped: dict[int, list[int]] = {}
        self.lookahead: dict[int, list[int]] = {}
        self.prefix: dict[int, int] = {}
        self.copies: list[tuple[int, int]] = []

    def allocate_prompt(self, seq: Sequence) -> bool:
        need = math.ceil(len(seq.token_ids) / self.block_size)
        table: list[int] = []
        for h in seq.prefix_hashes(self.block_size):
            hit = self.prefix.get(h)
            if hit is None:
                break
            self.gpu.share(hit)  # leak: if the tail does not fit, the references on the hits are not dropped
            table.append(hit)
        tail = self.gpu.allocate_n(need - len(table))  # clean: joins the sequence's table
        if tail is None:
            return False
        table.extend(tail)
        self.tables[seq.seq_id] = table
        return True

    def append_slot(self, seq: Sequence) -> int | None:
        table = self.tables[seq.seq_id]
        if len(seq.token_ids) > len(table) * self.block_size:
            bid = self.gpu.allocate()  # clean: near miss, None means nothing was taken, otherwise the table has it
            if bid is None:
                return None
            table.append(bid)
            return bid
        last = table[-1]
        if self.gpu.refcount(last) == 1:
            return last
        fresh = self.gpu.allocate()  # clean: near miss, takes the place of the last block, whose reference is freed
        if fresh is None:
            return None
        table[-1] = fresh
        self.copies.append((last, fresh))
        self.gpu.free(last)
        return fresh

    def fork(self, parent: Sequence, child: Sequence) -> None:
        table = self.tables[parent.seq_id]
        for bid in table:
            self.gpu.share(bid)  # clean: the child's table holds it until free()
        self.tables[child.seq_id] = list(table)

    def swap_out(self, seq: Sequence) -> list[tuple[int, int]] | None:
        table = self.tables[seq.seq_id]
        dst = self.cpu.allocate_n(len(table))  # leak: swap_in pops the entry and returns without it when the GPU is full
        if dst is None:
            return None
        self.swapped[seq.seq_id] = dst
        del self.tables[seq.seq_id]
        for bid in table:
            self.gpu.free(bid)
        return list(zip(table, dst))

    def swap_in(self, seq: Sequence) -> list[tuple[int, int]] | None:
        src = self.swapped.pop(seq.seq_id)
        dst = self.gpu.allocate_n(len(src))  # clean: becomes the sequence's table
        if dst is None:
            return None
        self.tables[seq.seq_id] = dst
        for bid in src:
            self.cpu.free(bid)
        return list(zip(src, dst))

    def reserve_lookahead(self, seq: Sequence, n: int) -> list[int]:
        extra = self.gpu.allocate_n(n)  # leak: a sequence freed before commit_lookahead leaves its entry behind
        if extra is None:
            return []
        self.lookahead.setdefault(seq.seq_id, []).extend(extra)
        return extra

    def commit_lookahead(self, seq: Sequence, accepted: int) -> None:
        extra = self.lookahead.pop(seq.seq_id, [])
        self.tables[seq.seq_id].extend(extra[:accepted])
        for bid in extra[accepted:]:
            self.gpu.free(bid)

    def register_prefix(self, seq: Sequence) -> None:
        for h, bid in zip(seq.prefix_hashes(self.block_size), self.tables[seq.seq_id]):
            if h in self.prefix:
                continue
            self.gpu.share(bid)  # clean: the prefix index owns it until evict_prefix
            self.prefix[h] = bid

    def refresh_prefix(self, h: int, bid: int) -> None:
        self.gpu.share(bid)  # leak: the block formerly under this hash keeps the index's reference
        self.prefix[h] = bid

    def evict_prefix(self, target: int) -> int:
        done = 0
        for h in list(self.prefix):
            if done >= target:
                break
            bid = self.prefix[h]
            if self.gpu.refcount(bid) == 1:
                del self.prefix[h]
                self.gpu.free(bid)
                done += 1
        return done

    def free(self, seq: Sequence) -> None:
        for bid in reversed(self.tables.pop(seq.seq_id, [])):
            self.gpu.free(bid)
        for bid in self.swapped.pop(seq.seq_id, []):
            self.cpu.free(bid)
