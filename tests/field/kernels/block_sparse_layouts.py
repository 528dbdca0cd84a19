"""Block-sparse attention whose index layouts live in a pinned LRU cache."""
from collections import OrderedDict

import torch
from torch import nn


class LayoutEntry:
    def __init__(self, key, rows, cols):
        self.key = key
        self.rows = rows
        self.cols = cols
        self.pins = 0


class LayoutCache:
    """Entries with pins are never evicted."""

    def __init__(self, capacity, build):
        self.capacity = capacity
        self.build = build
        self.entries = OrderedDict()

    def pin(self, key):
        entry = self.entries.get(key)
        if entry is None:
            self._make_room()
            entry = LayoutEntry(key, *self.build(key))
            self.entries[key] = entry
        self.entries.move_to_end(key)
        entry.pins += 1
        return entry

    def pin_if_cached(self, key):
        entry = self.entries.get(key)
        if entry is not None:
            entry.pins += 1
        return entry

    def unpin(self, entry):
        entry.pins -= 1

    def _make_room(self):
        while len(self.entries) >= self.capacity:
            for key, entry in self.entries.items():
                if entry.pins == 0:
                    del self.entries[key]
                    break
            else:
                return


class ScoreScratch:
    """Stacks of score buffers, one stack per power of two."""

    def __init__(self):
        self.stacks = {}

    def loan(self, numel):
        size = 1 << max(numel - 1, 1).bit_length()
        stack = self.stacks.get(size)
        return stack.pop() if stack else torch.empty(size)  # clean: handed to the caller

    def settle(self, buf):
        self.stacks.setdefault(buf.numel(), []).append(buf)


class BlockSparseAttention(nn.Module):
    def __init__(self, dim, heads, block, cache, scratch):
        super().__init__()
        self.heads, self.block = heads, block
        self.cache, self.scratch = cache, scratch
        self.qkv = nn.Linear(dim, 3 * dim)
        self.current = None

    def _scores(self, q, k, entry):
        nb = len(entry.rows)
        buf = self.scratch.loan(nb * self.block * self.block)  # clean: near miss, both the view and the buffer go to the caller
        view = buf[: nb * self.block * self.block].view(nb, self.block, self.block)
        torch.bmm(q[entry.rows], k[entry.cols].transpose(1, 2), out=view)
        return view, buf

    def _blocks(self, t):
        return t.reshape(-1, self.block, t.shape[-1])

    @torch.no_grad()
    def attend(self, q, k, v, key):
        entry = self.cache.pin(key)  # clean: unpinned before both returns
        if len(entry.rows) == 0:
            self.cache.unpin(entry)
            return torch.zeros_like(q)
        view, buf = self._scores(self._blocks(q), self._blocks(k), entry)  # clean: settled below
        p = torch.softmax(view, dim=-1)
        out = torch.zeros_like(self._blocks(q))
        out.index_add_(0, entry.rows, p @ self._blocks(v)[entry.cols])
        self.scratch.settle(buf)
        self.cache.unpin(entry)
        return out.view_as(q)

    @torch.no_grad()
    def block_mass(self, q, k, key):
        entry = self.cache.pin(key)  # clean: unpinned before the return
        view, _ = self._scores(self._blocks(q), self._blocks(k), entry)  # leak: the buffer lands in _ and is never settled
        mass = view.abs().sum(dim=(1, 2))
        self.cache.unpin(entry)
        return mass

    def density(self, key):
        entry = self.cache.pin_if_cached(key)  # leak: the pin is kept after the length is read
        if entry is None:
            return None
        return len(entry.rows) / float(max(int(entry.rows.max()) + 1, 1) ** 2)

    def overlap(self, key_a, key_b):
        a = self.cache.pin_if_cached(key_a)  # leak: not unpinned when only the second layout is missing
        b = self.cache.pin_if_cached(key_b)  # leak: not unpinned when only the first layout is missing
        if a is None or b is None:
            return 0
        pairs = set(zip(a.rows.tolist(), a.cols.tolist()))
        pairs &= set(zip(b.rows.tolist(), b.cols.tolist()))
        self.cache.unpin(a)
        self.cache.unpin(b)
        return len(pairs)

    def contains(self, key_a, key_b):
        a = self.cache.pin_if_cached(key_a)  # clean: near miss, each non-None pin is undone in the shared tail
        b = self.cache.pin_if_cached(key_b)  # clean: near miss, each non-None pin is undone in the shared tail
        answer = False
        if a is not None and b is not None:
            have = set(zip(a.rows.tolist(), a.cols.tolist()))
            answer = all(p in have for p in zip(b.rows.tolist(), b.cols.tolist()))
        for e in (a, b):
            if e is not None:
                self.cache.unpin(e)
        return answer

    def set_layout(self, key):
        if self.current is not None and self.current.key == key:
            return
        previous = self.current
        self.current = self.cache.pin(key)  # clean: near miss, the previous pin was saved and is undone next
        if previous is not None:
            self.cache.unpin(previous)

    def force_layout(self, key):
        self.current = self.cache.pin(key)  # leak: overwrites a current layout which stays pinned

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.current is None:
            return v
        return self.attend(q, k, v, self.current.key)

    def close(self):
        if self.current is not None:
            self.cache.unpin(self.current)
            self.current = None
