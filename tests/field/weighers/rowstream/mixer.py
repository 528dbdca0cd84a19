import numpy as np

from .reader import iter_blocks, load_block


class Mixer:
    """Mixes blocks of several sources into batches of token rows."""

    def __init__(self, buffers, sources, weights, pad=0):
        self.buffers = buffers
        self.sources = sources
        self.weights = np.asarray(weights, dtype=np.float64)
        self.pad = pad
        self.dropped = 0
        self.drawn = None

    def epoch(self, index, min_rows=4):
        """Batches of one source; blocks with too few rows that are not padding are dropped."""
        lengths = []
        for buf, count in iter_blocks(self.buffers, self.sources[index]):  # leak: thin blocks are skipped unstowed
            rows = buf[:count]
            keep = (rows != self.pad).any(axis=1)
            if keep.sum() < min_rows:
                self.dropped += int(count)
                continue
            lengths.extend((rows[keep] != self.pad).sum(axis=1).tolist())
            batch = rows[keep].copy()
            self.buffers.stow(buf)
            yield batch
        self.mean_length = float(np.mean(lengths)) if lengths else 0.0

    def count_tokens(self, index):
        total, longest = 0, 0
        for buf, count in iter_blocks(self.buffers, self.sources[index]):  # clean: near miss, stowed on both ways
            rows = buf[:count]
            live = (rows != self.pad).sum(axis=1)
            if not live.any():
                self.buffers.stow(buf)
                continue
            total += int(live.sum())
            longest = max(longest, int(live.max()))
            self.buffers.stow(buf)
        return total, longest

    def interleave(self, steps, rng):
        """Yield mixed batches: one block a source, rows drawn by weight."""
        per = (self.weights / self.weights.sum() * self.buffers.rows).astype(int)
        short = self.buffers.rows - int(per.sum())
        for extra in np.argsort(-self.weights)[:short]:
            per[extra] += 1
        drawn = np.zeros(len(self.sources), dtype=np.int64)
        last_rows = None
        for step in range(steps):
            blocks = [load_block(self.buffers, s, step) for s in self.sources]  # leak: an ended source ends it all
            if any(b is None for b in blocks):
                self.drawn = drawn
                return
            plain = self.buffers.draw()  # clean: near miss, stowed before the yield and before the continue
            picked, at = [], 0
            for index, (block, take) in enumerate(zip(blocks, per)):
                order = rng.permutation(self.buffers.rows)[:take]
                plain[at:at + take] = block[order]
                at += int(take)
                drawn[index] += int(take)
            filled = plain[:at]
            live = (filled != self.pad).any(axis=1)
            if not live.any():
                self.dropped += at
                self.buffers.stow(plain)
                for block in blocks:
                    self.buffers.stow(block)
                continue
            picked.append(filled[live])
            if last_rows is not None:
                picked.append(last_rows)
            mixed = np.concatenate(picked)
            rng.shuffle(mixed)
            last_rows = mixed[self.buffers.rows:].copy() if len(mixed) > self.buffers.rows else None
            self.buffers.stow(plain)
            for block in blocks:
                self.buffers.stow(block)
            yield mixed[:self.buffers.rows]
        self.drawn = drawn

    def interleave_uneven(self, steps, rng):
        """As interleave, but an ended source just takes no part."""
        for step in range(steps):
            blocks = [load_block(self.buffers, s, step) for s in self.sources]  # clean: near miss, Nones filtered
            live = [(b, w) for b, w in zip(blocks, self.weights) if b is not None]
            if not live:
                return
            scale = sum(w for _, w in live)
            picked = []
            for block, weight in live:
                take = int(weight / scale * self.buffers.rows)
                picked.append(block[rng.permutation(self.buffers.rows)[:take]])
                self.buffers.stow(block)
            mixed = np.concatenate(picked)
            rng.shuffle(mixed)
            yield mixed

    def preview(self, index, at, span):
        """A window of rows starting anywhere: parts of two blocks next to each other."""
        low, offset = divmod(at, self.buffers.rows)
        head = load_block(self.buffers, self.sources[index], low)  # leak: concatenated (copied) and not stowed
        if head is None:
            return np.empty((0, self.buffers.width), dtype=np.int32)
        if offset + span <= self.buffers.rows:
            window = head[offset:offset + span].copy()
            self.buffers.stow(head)
            return window
        tail = load_block(self.buffers, self.sources[index], low + 1)  # clean: near miss, stowed unless None
        if tail is None:
            window = head[offset:].copy()
            self.buffers.stow(head)
            return window
        rest = span - (self.buffers.rows - offset)
        window = np.concatenate([head[offset:], tail[:rest]])
        self.buffers.stow(tail)
        return window
