"""Packs tokenised documents into fixed rows for training; rows come from a pool of row numbers."""
from collections import deque

import numpy as np


class RowTable:
    """One big array; a lease is the number of one of its rows."""

    def __init__(self, rows, width, pad):
        self.cells = np.full((rows, width), pad, dtype=np.int32)
        self.pad = pad
        self.width = width
        self._open = deque(range(rows))

    def obtain(self):
        """A row number, or -1."""
        return self._open.popleft() if self._open else -1

    def relinquish(self, row):
        self.cells[row] = self.pad
        self._open.append(row)


class Packer:
    def __init__(self, table, eos, max_open=16, min_fill=0.9):
        self.table = table
        self.eos = eos
        self.max_open = max_open
        self.min_fill = min_fill
        self.wasted = 0

    def pack(self, docs):
        """Best-fit packing; yields copies of the rows that are full enough."""
        width = self.table.width
        cells = self.table.cells
        opened = []
        carry = None
        for doc in docs:
            tokens = np.asarray(doc, dtype=np.int32)
            if tokens.size == 0:
                continue
            if carry is not None:
                tokens = np.concatenate([carry, tokens])
                carry = None
            while tokens.size >= width:
                whole = self.table.obtain()  # clean: near miss, relinquished after the yield, -1 ends the loop
                if whole < 0:
                    break
                cells[whole, :] = tokens[:width]
                yield cells[whole].copy()
                self.table.relinquish(whole)
                tokens = tokens[width:]
            if tokens.size >= width:
                carry = tokens
                continue
            tokens = np.append(tokens, self.eos)[:width]
            best = None
            for slot, (row, used) in enumerate(opened):
                room = width - used
                if room >= tokens.size and (best is None or room < width - opened[best][1]):
                    best = slot
            if best is not None:
                row, used = opened[best]
                cells[row, used:used + tokens.size] = tokens
                opened[best] = (row, used + tokens.size)
                if used + tokens.size == width:
                    del opened[best]
                    yield cells[row].copy()
                    self.table.relinquish(row)
                continue
            if len(opened) >= self.max_open:
                fullest = max(range(len(opened)), key=lambda i: opened[i][1])
                row, used = opened.pop(fullest)
                self.wasted += width - used
                yield cells[row].copy()
                self.table.relinquish(row)
            fresh = self.table.obtain()  # leak: rows not full enough are left out of the last loop unrelinquished
            if fresh < 0:
                carry = tokens
                continue
            cells[fresh, :tokens.size] = tokens
            opened.append((fresh, tokens.size))
        for row, used in opened:
            if used < self.min_fill * width:
                self.wasted += used
                continue
            self.wasted += width - used
            yield cells[row].copy()
            self.table.relinquish(row)

    def pack_pairs(self, pairs, limit=None):
        """Prompt and answer rows side by side with a loss mask; returns stacked copies."""
        width = self.table.width
        cells = self.table.cells
        left, right, masks = [], [], []
        rejected = 0
        for number, (prompt, answer) in enumerate(pairs):
            if limit is not None and number >= limit:
                break
            if not prompt or not answer:
                rejected += 1
                continue
            first = self.table.obtain()  # clean: near miss, relinquished when the second is -1, and below
            second = self.table.obtain()  # leak: an answer that was cut relinquishes the first one only
            if first < 0:
                rejected += 1
                break
            if second < 0:
                self.table.relinquish(first)
                rejected += 1
                break
            head = prompt[-width:]
            cells[first, width - len(head):] = head
            body = answer[:width - 1] + [self.eos]
            cells[second, :len(body)] = body
            mask = cells[second] != self.table.pad
            if len(body) < len(answer) + 1:
                rejected += 1
                self.table.relinquish(first)
                continue
            left.append(cells[first].copy())
            right.append(cells[second].copy())
            masks.append(mask)
            for row in (first, second):
                self.table.relinquish(row)
        if not left:
            return None
        self.wasted += rejected
        return np.stack(left), np.stack(right), np.stack(masks)

    def bucket_by_length(self, docs, edges):
        """Groups short documents by length, one row a document, and gives a dense batch a bucket."""
        buckets = {edge: [] for edge in edges}
        over = []
        for doc in docs:
            for edge in edges:
                if len(doc) <= edge:
                    break
            else:
                over.append(doc)
                continue
            row = self.table.obtain()  # clean: near miss, in its bucket, relinquished by the drain below
            if row < 0:
                over.append(doc)
                continue
            self.table.cells[row, :len(doc)] = doc
            buckets[edge].append((row, len(doc)))
        batches = {}
        for edge, members in buckets.items():
            if members:
                rows = [row for row, _ in members]
                batches[edge] = (self.table.cells[rows, :edge].copy(), [n for _, n in members])
            while members:
                row, _ = members.pop()
                self.table.relinquish(row)
        return batches, over

    def shuffle_window(self, docs, size, rng):
        """Yield documents in a locally random order; a full window holds `size` rows."""
        window = []
        for doc in docs:
            if (row := self.table.obtain()) < 0:  # leak: the row swapped out of the window is yielded, not relinquished
                self.wasted += len(doc)
                continue
            self.table.cells[row, :len(doc)] = doc
            window.append((row, len(doc)))
            if len(window) < size:
                continue
            pick = int(rng.integers(len(window)))
            window[pick], window[-1] = window[-1], window[pick]
            chosen, length = window.pop()
            yield self.table.cells[chosen, :length].copy()
        rng.shuffle(window)
        while window:
            row, length = window.pop()
            yield self.table.cells[row, :length].copy()
            self.table.relinquish(row)
