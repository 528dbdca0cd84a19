"""Host frames: an arena with a moving end and size classes of freed frames."""
import threading
from collections import defaultdict
from typing import Dict, List, NamedTuple, Optional


class Frame(NamedTuple):
    offset: int
    size: int


class FrameArena:
    def __init__(self, size: int):
        self.buf = bytearray(size)
        self._end = 0
        self._classes: Dict[int, List[Frame]] = defaultdict(list)
        self._lock = threading.Lock()

    @staticmethod
    def _klass(n: int) -> int:
        return max(4096, 1 << (n - 1).bit_length())

    def cut(self, n: int) -> Optional[Frame]:
        k = self._klass(n)
        with self._lock:
            if self._classes[k]:
                return self._classes[k].pop()  # clean: returned to the caller
            if self._end + k > len(self.buf):
                return self._split(k)  # clean: returned to the caller
            f = Frame(self._end, k)
            self._end += k
            return f

    def _split(self, k: int) -> Optional[Frame]:
        """Halves a frame of the next class up."""
        bigger = self._classes.get(k * 2)
        if not bigger:
            return None
        whole = bigger.pop()  # leak: the second half goes to no class list
        return Frame(whole.offset, k)

    def paste(self, f: Frame) -> None:
        with self._lock:
            self._classes[f.size].append(f)

    def view(self, f: Frame) -> memoryview:
        return memoryview(self.buf)[f.offset: f.offset + f.size]
