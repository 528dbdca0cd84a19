"""Buddy allocator of device memory, lent by (offset, order)."""


class BuddyHeap:
    def __init__(self, max_order):
        self.max_order = max_order
        self.bins = [set() for _ in range(max_order + 1)]
        self.bins[max_order].add(0)

    def carve(self, size):
        order = max(size - 1, 0).bit_length()
        level = order
        while level <= self.max_order and not self.bins[level]:
            level += 1
        if level > self.max_order:
            raise MemoryError(size)
        base = self.bins[level].pop()
        while level > order:
            level -= 1
            self.bins[level].add(base + (1 << level))
        return base, order

    def merge(self, block):
        base, order = block
        while order < self.max_order:
            twin = base ^ (1 << order)
            if twin not in self.bins[order]:
                break
            self.bins[order].remove(twin)
            base = min(base, twin)
            order += 1
        self.bins[order].add(base)


class Workspace:
    def __init__(self, heap, device):
        self.heap = heap
        self.device = device

    def transpose(self, src, n):
        tmp = self.heap.carve(n * n * 4)  # clean: merged back at the end
        self.device.transpose(src, tmp[0], n)
        self.device.copy(tmp[0], src, n * n * 4)
        self.heap.merge(tmp)

    def scratch(self, n):
        return self.heap.carve(n)  # clean: handed to the caller

    def convolve(self, src, n, taps):
        tmp = self.scratch(n * 4)  # leak: kept on the small kernel path
        if taps < 4:
            self.device.direct(src, tmp[0], taps)
            return "direct"
        self.device.winograd(src, tmp[0], taps)
        self.heap.merge(tmp)
        return "winograd"


def largest_fit(heap, sizes):
    best = 0
    for size in sizes:
        block = heap.carve(size)  # leak: only the last block is merged back
        best = max(best, block[1])
    heap.merge(block)
    return best
