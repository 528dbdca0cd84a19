import struct
from collections import deque
from contextlib import contextmanager
from typing import Deque, Iterator, List, Optional

from .store import ShardStore
from .windows import Window


class ShardReader:
    def __init__(self, store: ShardStore, names: List[str], depth: int = 2) -> None:
        self.store = store
        self.names = names
        self.depth = depth
        self.ahead: Deque[Window] = deque()
        self.current: Optional[Window] = None

    @contextmanager
    def opened(self, name: str) -> Iterator[Optional[Window]]:
        win = self.store.map(name)  # clean: near miss, unmapped after the with body however it is left
        try:
            yield win
        finally:
            if win is not None:
                self.store.unmap(win)

    def count(self, name: str) -> int:
        with self.opened(name) as win:
            if win is None or len(win.view) < 4:
                return 0
            return struct.unpack_from("<I", win.view)[0]

    def seek(self, name: str) -> bool:
        win = self.store.map(name)  # leak: the window that was current is overwritten without unmap
        if win is None:
            return False
        self.current = win
        return True

    def advance(self, name: str) -> bool:
        win = self.store.map(name)  # clean: near miss, the former current window is unmapped before
        if win is None:
            return False
        if self.current is not None:
            self.store.unmap(self.current)
        self.current = win
        return True

    def prefetch(self) -> int:
        for name in self.names:
            if len(self.ahead) >= self.depth:
                break
            win = self.store.map(name)  # leak: shards without a payload are mapped, passed over and never unmapped
            if win is None:
                continue
            if len(win.view) <= 8:
                continue
            self.ahead.append(win)
        return len(self.ahead)

    def pop_ahead(self) -> Optional[bytes]:
        if not self.ahead:
            return None
        win = self.ahead.popleft()
        head = bytes(win.view[:8])
        self.store.unmap(win)
        return head

    def records(self, size: int) -> Iterator[bytes]:
        for name in self.names:
            win = self.store.map(name)  # clean: near miss, the finally runs when the generator is closed too
            if win is None:
                continue
            try:
                for pos in range(4, len(win.view) - size + 1, size):
                    yield bytes(win.view[pos : pos + size])
            finally:
                self.store.unmap(win)

    def find(self, needle: bytes) -> Optional[str]:
        for name in self.names:
            win = self.store.map(name)  # leak: the name is returned from within the loop while the window is still mapped
            if win is None:
                continue
            if win.view.find(needle) >= 0:
                return name
            self.store.unmap(win)
        return None

    def close(self) -> None:
        if self.current is not None:
            self.store.unmap(self.current)
            self.current = None
        while self.ahead:
            self.store.unmap(self.ahead.popleft())
