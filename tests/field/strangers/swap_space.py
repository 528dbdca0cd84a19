"""CPU swap space: preemption by swapping and by recomputation."""
from collections import OrderedDict


class SwapBlocks:
    def __init__(self, n):
        self._left = n

    def reserve_swap(self, n):
        if n > self._left:
            raise MemoryError(n)
        self._left -= n
        return SwapArea(n)

    def unreserve_swap(self, area):
        self._left += area.n


class SwapArea:
    def __init__(self, n):
        self.n = n


class Group:
    def __init__(self, gid, length):
        self.gid = gid
        self.length = length
        self.area = None
        self.mode = "running"


class Preemptor:
    def __init__(self, blocks):
        self.blocks = blocks
        self.swapped = OrderedDict()
        self.recompute = []

    def preempt(self, group):
        if group.mode != "running":
            return False
        try:
            group.area = self.blocks.reserve_swap(group.length)  # clean: near miss, only without an error, unreserved by resume and cancel
        except MemoryError:
            group.mode = "recompute"
            self.recompute.append(group)
            return False
        group.mode = "swapped"
        self.swapped[group.gid] = group
        return True

    def resume(self):
        if not self.swapped:
            return None
        _, group = self.swapped.popitem(last=False)
        area, group.area = group.area, None
        group.mode = "running"
        self.blocks.unreserve_swap(area)
        return group

    def cancel(self, gid):
        group = self.swapped.pop(gid, None)
        if group is None:
            return
        self.blocks.unreserve_swap(group.area)
        group.area = None
        group.mode = "cancelled"

    def try_both(self, a, b):
        first = self.blocks.reserve_swap(a.length)  # leak: the second MemoryError is caught and the first area forgotten
        try:
            second = self.blocks.reserve_swap(b.length)  # clean: near miss, the handler runs only when there is none
        except MemoryError:
            return False
        self.blocks.unreserve_swap(second)
        self.blocks.unreserve_swap(first)
        return True

    def try_both_properly(self, a, b):
        first = self.blocks.reserve_swap(a.length)  # clean: near miss, the finally round the second covers the first
        try:
            second = self.blocks.reserve_swap(b.length)  # clean: near miss, unreserved right away, or never there
            self.blocks.unreserve_swap(second)
            return True
        except MemoryError:
            return False
        finally:
            self.blocks.unreserve_swap(first)

    def fits(self, lengths):
        areas = []
        try:
            for n in lengths:
                areas.append(self.blocks.reserve_swap(n))  # leak: when one does not fit the others stay reserved
        except MemoryError:
            return False
        for area in areas:
            self.blocks.unreserve_swap(area)
        return True

    def how_many(self, n):
        areas = []
        try:
            while True:
                areas.append(self.blocks.reserve_swap(n))  # clean: near miss, the loop only ends by the error, then all go back
        except MemoryError:
            pass
        for area in areas:
            self.blocks.unreserve_swap(area)
        return len(areas)
