import torch


class Arena:
    """Handles into one flat allocation; a free list of (offset, length) spans."""

    def __init__(self, numel):
        self.flat = torch.empty(numel)
        self.spans = [(0, numel)]
        self.live = {}
        self._next = 0

    def malloc(self, n):
        for i, (off, ln) in enumerate(self.spans):
            if ln >= n:
                if ln == n:
                    self.spans.pop(i)  # clean: the whole span becomes the new handle
                else:
                    self.spans[i] = (off + n, ln - n)
                self._next += 1
                self.live[self._next] = (off, n)
                return self._next
        return None

    def mfree(self, h):
        off, n = self.live.pop(h)
        self.spans.append((off, n))

    def ptr(self, h):
        off, n = self.live[h]
        return self.flat[off : off + n]


class CountingArena(Arena):
    """Keeps statistics and delegates the work."""

    def __init__(self, numel):
        super().__init__(numel)
        self.peak = 0

    def malloc(self, n):
        h = super().malloc(n)  # clean: passed through to the caller
        if h is not None:
            self.peak = max(self.peak, sum(ln for _, ln in self.live.values()))
        return h

    def compact(self):
        merged = []
        for off, ln in sorted(self.spans):
            if merged and merged[-1][0] + merged[-1][1] == off:
                last = merged.pop()  # clean: near miss, goes back in joined with its neighbour
                merged.append((last[0], last[1] + ln))
            else:
                merged.append((off, ln))
        self.spans = merged

    def take_largest(self, at_least):
        self.spans.sort(key=lambda s: s[1])
        off, ln = self.spans.pop()  # leak: a span below the minimum is neither handed out nor put back
        if ln < at_least:
            return None
        self._next += 1
        self.live[self._next] = (off, ln)
        return self._next
