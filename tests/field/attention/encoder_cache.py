# Encoder output cache for multimodal requests. Budget is counted in embedding rows.
import collections
import logging

import torch

logger = logging.getLogger(__name__)


class RowBudget:
    def __init__(self, total):
        self.total = total
        self.used = 0

    def reserve_rows(self, n):
        if self.used + n > self.total:
            return False
        self.used += n
        return True

    def unreserve_rows(self, n):
        self.used -= n


class EmbedArena:
    def __init__(self, rows, dim):
        self.data = torch.empty(rows, dim)
        self._holes = [(0, rows)]

    def alloc_span(self, n):
        for i, (start, length) in enumerate(self._holes):
            if length >= n:
                if length == n:
                    self._holes.pop(i)
                else:
                    self._holes[i] = (start + n, length - n)
                return (start, n)
        return None

    def free_span(self, span):
        self._holes.append(span)
        self._holes.sort()
        merged = []
        for s, l in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == s:
                merged[-1] = (merged[-1][0], merged[-1][1] + l)
            else:
                merged.append((s, l))
        self._holes = merged

    def carve(self, n):
        if not self._holes:
            return None
        start, length = self._holes.pop()  # leak: a hole that is too short disappears from the list
        if length < n:
            return None
        if length > n:
            self._holes.append((start + n, length - n))
        return (start, n)


class EncoderCache:
    def __init__(self, arena, budget, encoder, max_items=64):
        self.arena = arena
        self.budget = budget
        self.encoder = encoder
        self.max_items = max_items
        self.items = collections.OrderedDict()

    def lookup(self, key):
        span = self.items.get(key)
        if span is None:
            return None
        self.items.move_to_end(key)
        return self.arena.data[span[0]:span[0] + span[1]]

    def encode(self, key, pixels):
        hit = self.lookup(key)
        if hit is not None:
            return hit
        feats = self.encoder(pixels)
        n = feats.shape[0]
        if not self.budget.reserve_rows(n):  # clean: near miss, unreserved if no span is found, else evict unreserves
            return None
        span = self.arena.alloc_span(n)  # clean: stored in items, evict frees it
        if span is None:
            self.budget.unreserve_rows(n)
            return None
        self.arena.data[span[0]:span[0] + n].copy_(feats)
        self.items[key] = span
        return self.arena.data[span[0]:span[0] + n]

    def encode_big(self, key, pixels):
        if key in self.items:
            return self.lookup(key)
        feats = self.encoder(pixels)
        n = feats.shape[0]
        if not self.budget.reserve_rows(n):  # leak: when even eviction yields no span the budget stays taken
            return None
        span = self.arena.alloc_span(n)  # clean: stored in items
        while span is None:
            if not self.items:
                logger.error("item %s does not fit", key)
                return None
            self.evict_one()
            span = self.arena.alloc_span(n)  # clean: stored in items
        self.arena.data[span[0]:span[0] + n].copy_(feats)
        self.items[key] = span
        return self.lookup(key)

    def evict_one(self):
        _, span = self.items.popitem(last=False)
        self.arena.free_span(span)
        self.budget.unreserve_rows(span[1])

    def clear(self):
        while self.items:
            self.evict_one()

    def pooled(self, pixels):
        feats = self.encoder(pixels)
        span = self.arena.alloc_span(feats.shape[0])  # clean: freed after the mean
        if span is None:
            return feats.mean(0)
        rows = self.arena.data[span[0]:span[0] + span[1]]
        rows.copy_(feats)
        out = rows.mean(0)
        self.arena.free_span(span)
        return out

    def pooled_normalized(self, pixels, eps):
        feats = self.encoder(pixels)
        span = self.arena.alloc_span(feats.shape[0])  # leak: a vanishing norm returns the plain mean with the span taken
        if span is None:
            return feats.mean(0)
        rows = self.arena.data[span[0]:span[0] + span[1]]
        rows.copy_(feats)
        norm = rows.norm()
        if norm < eps:
            return feats.mean(0)
        out = (rows / norm).mean(0)
        self.arena.free_span(span)
        return out

    def compact(self):
        moved = collections.OrderedDict()
        for key, span in self.items.items():
            dst = self.arena.alloc_span(span[1])  # clean: near miss, the source span is freed and dst replaces it in the new table
            if dst is None:
                moved[key] = span
                continue
            self.arena.data[dst[0]:dst[0] + dst[1]] = self.arena.data[span[0]:span[0] + span[1]].clone()
            self.arena.free_span(span)
            moved[key] = dst
        self.items = moved

    def rebuild(self, keep):
        kept = collections.OrderedDict()
        for key, span in self.items.items():
            if key not in keep:
                self.arena.free_span(span)
                self.budget.unreserve_rows(span[1])
                continue
            kept[key] = span
        self.items = kept


class FrameWindow:
    """Last few video frames, one span each."""

    def __init__(self, arena, frames):
        self.arena = arena
        self.frames = frames
        self.spans = collections.deque()

    def push(self, feats):
        if len(self.spans) >= self.frames:
            self.arena.free_span(self.spans.popleft())
        span = self.arena.alloc_span(feats.shape[0])  # clean: near miss, the oldest is freed before the new one is queued
        if span is None:
            return False
        self.arena.data[span[0]:span[0] + span[1]].copy_(feats)
        self.spans.append(span)
        return True

    def push_pair(self, a, b):
        spans = [self.arena.alloc_span(x.shape[0]) for x in (a, b)]  # leak: one granted span is forgotten when the other is None
        if None in spans:
            return False
        self.spans.extend(spans)
        return True

    def reset(self):
        while self.spans:
            self.arena.free_span(self.spans.pop())
