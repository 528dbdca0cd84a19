"""Buddy allocator over a contiguous region of device memory."""


class Buddy:
    def __init__(self, top):
        self.top = top
        self.lists = [set() for _ in range(top + 1)]
        self.lists[top].add(0)
        self.order_of = {}

    def halve(self, order):
        if order > self.top:
            return None
        if self.lists[order]:
            return self.lists[order].pop()
        addr = self.halve(order + 1)
        if addr is not None:
            self.lists[order].add(addr + (1 << order))
        return addr

    def palloc(self, size):
        order = max(0, (size - 1).bit_length())
        addr = self.halve(order)
        if addr is not None:
            self.order_of[addr] = order
        return addr

    def pfree(self, addr):
        order = self.order_of.pop(addr)
        while order < self.top and (addr ^ (1 << order)) in self.lists[order]:
            self.lists[order].remove(addr ^ (1 << order))
            addr &= ~(1 << order)
            order += 1
        self.lists[order].add(addr)


def upload(buddy, dev, payload):
    addr = buddy.palloc(len(payload))  # clean: freed in finally
    if addr is None:
        return False
    try:
        dev.write(addr, payload)
        return dev.fire(addr, len(payload))
    finally:
        buddy.pfree(addr)


def checksum(buddy, dev, payload):
    src = buddy.palloc(len(payload))  # leak: no room for the result, and the source block stays taken
    if src is None:
        return None
    dst = buddy.palloc(4)  # clean: freed with the source after the run
    if dst is None:
        return None
    dev.write(src, payload)
    value = dev.crc(src, dst)
    buddy.pfree(dst)
    buddy.pfree(src)
    return value


def largest_fit(buddy, sizes):
    for size in sorted(sizes, reverse=True):
        addr = buddy.palloc(size)  # leak: the size goes out, the block that proved it does not
        if addr is not None:
            return size
    return 0
