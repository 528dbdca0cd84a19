"""Workspaces for attention kernels: a chunked arena, plan objects and split-KV scratch.

An arena is a stack of chunks. `carve` returns a Piece; `uncarve` puts it back.
Kernels plan once per batch shape and run many times.
"""
import contextlib
import logging

import torch

logger = logging.getLogger(__name__)

ALIGN = 256


class Piece:
    def __init__(self, arena, start, size):
        self.arena = arena
        self.start = start
        self.size = size

    def view(self, dtype=torch.uint8):
        return self.arena.mem[self.start:self.start + self.size].view(dtype)

    def uncarve(self):
        self.arena.uncarve(self)


class Arena:
    """First-fit arena over one flat allocation."""

    def __init__(self, nbytes, device="cuda"):
        self.mem = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.holes = [(0, nbytes)]
        self.in_use = 0

    def carve(self, nbytes):
        nbytes = (nbytes + ALIGN - 1) // ALIGN * ALIGN
        for i, (start, size) in enumerate(self.holes):
            if size >= nbytes:
                if size == nbytes:
                    self.holes.pop(i)  # clean: the whole hole becomes the piece
                else:
                    self.holes[i] = (start + nbytes, size - nbytes)
                self.in_use += nbytes
                return Piece(self, start, nbytes)
        return None

    def uncarve(self, piece):
        self.in_use -= piece.size
        self.holes.append((piece.start, piece.size))
        self.holes.sort()
        merged = [self.holes[0]]
        for start, size in self.holes[1:]:
            last_start, last_size = merged[-1]
            if last_start + last_size == start:
                merged[-1] = (last_start, last_size + size)
            else:
                merged.append((start, size))
        self.holes = merged

    @contextlib.contextmanager
    def scratch(self, nbytes):
        piece = self.carve(nbytes)  # clean: uncarved in finally after the None check
        if piece is None:
            raise MemoryError(f"attention workspace: {nbytes} bytes")
        try:
            yield piece
        finally:
            self.uncarve(piece)


class TwoTier:
    """A small arena for plans in front of a large one for partial outputs."""

    def __init__(self, small, large, cutoff):
        self.small = small
        self.large = large
        self.cutoff = cutoff

    def get(self, nbytes):
        if nbytes <= self.cutoff:
            piece = self.small.carve(nbytes)  # clean: returned when there is room
            if piece is not None:
                return piece
        return self.large.carve(nbytes)  # clean: returned to the caller

    def get_pair(self, meta_bytes, out_bytes):
        meta = self.small.carve(meta_bytes)  # leak: not uncarved when the large arena is full
        if meta is None:
            return None
        out = self.large.carve(out_bytes)  # clean: returned with meta
        if out is None:
            return None
        return meta, out

    def get_aligned(self, nbytes, boundary):
        """A piece starting on `boundary`; retries with padding."""
        piece = self.large.carve(nbytes)  # leak: a misaligned first piece is rebound by the padded one
        if piece is not None and piece.start % boundary:
            piece = self.large.carve(nbytes + boundary)  # clean: returned to the caller
        return piece


class Plan:
    """Tile assignment for one batch; holds its index piece until `discard`."""

    def __init__(self, tiers, seq_lens, tile):
        self.tiles = [-(-n // tile) for n in seq_lens]
        self.index = tiers.get(8 * sum(self.tiles))  # clean: near miss, held by the plan and given back by discard()
        self.splits = None
        if self.index is None:
            raise MemoryError("no room for a plan")

    def add_splits(self, tiers, nbytes):
        if self.splits is None:
            self.splits = tiers.get(nbytes)  # clean: near miss, only when there is none yet and discard() uncarves it
        return self.splits

    def discard(self):
        if self.index is not None:
            self.index.uncarve()
            self.index = None
        if self.splits is not None:
            self.splits.uncarve()
            self.splits = None


class PlanCache:
    def __init__(self, tiers, capacity=8):
        self.tiers = tiers
        self.capacity = capacity
        self._plans = {}

    def lookup(self, seq_lens, tile):
        key = (tuple(seq_lens), tile)
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = Plan(self.tiers, seq_lens, tile)  # clean: kept in self._plans, eviction and clear() discard it
        self._plans[key] = plan
        while len(self._plans) > self.capacity:
            oldest = next(iter(self._plans))
            self._plans.pop(oldest).discard()
        return plan

    def clear(self):
        for plan in self._plans.values():
            plan.discard()
        self._plans.clear()


class Attention:
    def __init__(self, kernel, tiers, heads, head_dim, use_splits=False):
        self.kernel = kernel
        self.tiers = tiers
        self.heads = heads
        self.head_dim = head_dim
        self.use_splits = use_splits
        self.lse = None

    def begin(self, bs):
        if self.use_splits:
            if self.lse is not None:
                self.lse.uncarve()
            self.lse = self.tiers.get(4 * bs * self.heads)  # clean: near miss, end() uncarves under the same flag

    def end(self):
        if self.use_splits and self.lse is not None:
            self.lse.uncarve()
            self.lse = None

    def prefill(self, q, kv, causal=True):
        pair = self.tiers.get_pair(q.shape[0] * 8, q.numel() * 4)  # leak: the out piece is uncarved and meta is forgotten
        if pair is None:
            return self.kernel.run_single(q, kv)
        meta, part = pair
        self.kernel.run_ragged(q, kv, meta.view(torch.int64), part.view(torch.float32), causal)
        out = part.view(torch.float32).clone()
        part.uncarve()
        return out

    def chunked(self, q, kv, chunk):
        """Yields one output per chunk of the query, reusing one piece."""
        piece = self.tiers.get(chunk * self.heads * self.head_dim * 4)  # leak: the return for an empty chunk skips uncarve
        if piece is None:
            return
        for start in range(0, q.shape[0], chunk):
            part = q[start:start + chunk]
            if not part.any():
                return
            self.kernel.run_into(part, kv, piece.view(torch.float32))
            yield piece.view(torch.float32)[:part.numel()].clone()
        piece.uncarve()

    def chunked_safe(self, q, kv, chunk):
        piece = self.tiers.get(chunk * self.heads * self.head_dim * 4)  # clean: near miss, generator with finally around the yields
        if piece is None:
            return
        try:
            for start in range(0, q.shape[0], chunk):
                part = q[start:start + chunk]
                if not part.any():
                    return
                self.kernel.run_into(part, kv, piece.view(torch.float32))
                yield piece.view(torch.float32)[:part.numel()].clone()
        finally:
            piece.uncarve()

    def cascade(self, levels, q):
        """Merge attention over shared-prefix levels."""
        outs = []
        with contextlib.ExitStack() as stack:
            for kv in levels:
                piece = stack.enter_context(self.tiers.large.scratch(q.numel() * 4))  # clean: the exit stack gives it back
                self.kernel.run_into(q, kv, piece.view(torch.float32))
                outs.append(piece.view(torch.float32))
            return torch.stack(outs).sum(0)


def autotune(kernel, arena, q, kv, tile_sizes):
    """Time every tile size that fits and return the fastest."""
    best, best_ms = None, float("inf")
    for tile in tile_sizes:
        piece = arena.carve(tile * q.shape[-1] * 4)  # leak: continue on an unsupported tile size skips uncarve
        if piece is None:
            break
        ms = kernel.time(q, kv, tile, piece.view(torch.float32))
        if ms is None:
            continue
        if ms < best_ms:
            best, best_ms = tile, ms
        piece.uncarve()
    return best
