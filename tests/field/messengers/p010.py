"""Page pins in the buffer manager of a storage engine."""


class Frame:
    def __init__(self, page_no, data):
        self.page_no = page_no
        self.data = bytearray(data)
        self.pins = 0
        self.dirty = False


class BufferManager:
    def __init__(self, disk):
        self.disk = disk
        self.frames = {}

    def pin(self, page_no):
        frame = self.frames.get(page_no)
        if frame is None:
            frame = self.frames[page_no] = Frame(page_no, self.disk.read(page_no))
        frame.pins += 1
        return frame

    def unpin(self, frame, dirty=False):
        frame.dirty |= dirty
        frame.pins -= 1


def checksum(frame):
    return sum(frame.data) & 0xFFFF


class HeapFile:
    def __init__(self, buffers, first, last):
        self.buffers = buffers
        self.first = first
        self.last = last

    def header(self):
        return self.buffers.pin(self.first)  # clean: handed to the caller

    def tail_page(self):
        head = self.header()  # clean: unpinned before the tail is pinned
        no = int.from_bytes(head.data[:4], "little") or self.last
        self.buffers.unpin(head)
        return self.buffers.pin(no)  # clean: handed to the caller

    def append(self, record):
        page = self.tail_page()  # clean: unpinned dirty
        used = page.data[4]
        page.data[8 + used:8 + used + len(record)] = record
        page.data[4] = used + len(record)
        self.buffers.unpin(page, dirty=True)
        return page.page_no

    def snapshot(self):
        page = bytes(self.tail_page().data)  # leak: the copy is kept, the pin is not ended
        return page.rstrip(b"\0")

    def same_tail(self, other):
        mine = self.tail_page()  # clean: unpinned at the end
        theirs = other.tail_page()  # leak: only mine is unpinned
        equal = checksum(mine) == checksum(theirs)
        self.buffers.unpin(mine)
        return equal

    def scan(self):
        for no in range(self.first, self.last + 1):
            page = self.buffers.pin(no)  # clean: unpinned on both ways of the round
            if page.data[4] == 0:
                self.buffers.unpin(page)
                continue
            body = bytes(page.data[8:8 + page.data[4]])
            self.buffers.unpin(page)
            yield no, body
