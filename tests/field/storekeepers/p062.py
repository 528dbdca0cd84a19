import mmap


class Descriptor:
    __slots__ = ("index", "addr", "length", "flags")

    def __init__(self, index):
        self.index = index
        self.addr = 0
        self.length = 0
        self.flags = 0


class DescriptorTable:
    def __init__(self, n):
        self.unlinked = [Descriptor(i) for i in range(n)]

    def link(self, addr, length):
        desc = self.unlinked.pop()
        desc.addr, desc.length = addr, length
        return desc

    def unlink(self, desc):
        desc.flags = 0
        self.unlinked.append(desc)


class VirtQueue:
    def __init__(self, table, size):
        self.table = table
        self.region = mmap.mmap(-1, size)
        self.avail = []
        self.used = [None] * 8
        self.tail = 0
        self.event = table.link(0, 16)  # clean: destroy unlinks it

    def add(self, data):
        addr = self.tail
        self.region[addr:addr + len(data)] = data
        desc = self.table.link(addr, len(data))  # leak: kick stores it over an earlier one in the used ring
        self.tail += len(data)
        self.avail.append(desc)
        return desc.index

    def kick(self):
        for desc in self.avail:
            desc.flags = 1
            self.used[desc.index % len(self.used)] = desc
        count = len(self.avail)
        self.avail = []
        return count

    def reap(self):
        for i, desc in enumerate(self.used):
            if desc is not None:
                self.used[i] = None
                self.table.unlink(desc)

    def add_chain(self, parts):
        head = None
        for addr, length in parts:
            desc = self.table.link(addr, length)  # leak: only the head of the chain is unlinked
            if head is None:
                head = desc
            desc.flags |= 2
        if head is not None:
            self.table.unlink(head)
        return len(parts)

    def notify(self):
        desc = self.table.link(0, 4)  # clean: unlinked below
        value = int.from_bytes(self.region[desc.addr:desc.addr + desc.length], "little")
        self.table.unlink(desc)
        return value + self.event.length

    def destroy(self):
        self.reap()
        while self.avail:
            self.table.unlink(self.avail.pop())
        self.table.unlink(self.event)
        self.region.close()
