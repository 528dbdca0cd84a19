# take: P.split_off(n)
# give: P.coalesce(X)
# gets: optional
# type: BuddyPages
class BuddyPages:
    """Binary buddy allocator in units of pages. Returns the first page of a 2**k run."""

    def __init__(self, order):
        self.order = order
        self.free = [set() for _ in range(order + 1)]
        self.free[order].add(0)
        self.taken = {}

    def split_off(self, npages):
        k = max(npages - 1, 0).bit_length()
        j = next((j for j in range(k, self.order + 1) if self.free[j]), None)
        if j is None:
            return None
        base = self.free[j].pop()
        while j > k:
            j -= 1
            self.free[j].add(base + (1 << j))
        self.taken[base] = k
        return base

    def coalesce(self, base):
        k = self.taken.pop(base)
        while k < self.order:
            buddy = base ^ (1 << k)
            if buddy not in self.free[k]:
                break
            self.free[k].remove(buddy)
            base = min(base, buddy)
            k += 1
        self.free[k].add(base)
