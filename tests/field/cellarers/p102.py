"""Buffer manager of a small heap-file engine."""
from dataclasses import dataclass, field

PAGE = 4096


@dataclass
class Frame:
    page_no: int
    data: bytearray
    pins: int = 0
    dirty: bool = False


@dataclass
class BufferManager:
    file: object
    capacity: int = 64
    frames: dict = field(default_factory=dict)

    def _evict_one(self):
        for no, fr in self.frames.items():
            if fr.pins == 0:
                if fr.dirty:
                    self.file.seek(no * PAGE)
                    self.file.write(fr.data)
                del self.frames[no]
                return
        raise MemoryError("every frame is pinned")

    def fix(self, page_no):
        fr = self.frames.get(page_no)
        if fr is None:
            if len(self.frames) >= self.capacity:
                self._evict_one()
            self.file.seek(page_no * PAGE)
            fr = self.frames[page_no] = Frame(page_no, bytearray(self.file.read(PAGE).ljust(PAGE, b"\0")))
        fr.pins += 1
        return fr

    def unfix(self, fr, dirty=False):
        fr.pins -= 1
        fr.dirty = fr.dirty or dirty


def read_slot(bm, page_no, slot):
    fr = bm.fix(page_no)  # clean: unfixed in finally
    try:
        return bytes(fr.data[slot * 32:slot * 32 + 32])
    finally:
        bm.unfix(fr)


def copy_page(bm, src, dst):
    a = bm.fix(src)  # clean: unfixed at the end
    b = bm.fix(dst)  # leak: only the source frame is unfixed
    b.data[:] = a.data
    b.dirty = True
    bm.unfix(a)


def first_page_with_room(bm, last, need):
    for no in range(last):
        fr = bm.fix(no)  # leak: the break leaves the found page pinned and only its number goes out
        if fr.data.count(0) >= need:
            break
        bm.unfix(fr)
    else:
        return -1
    return no
