"""Host and disk tiers below the GPU cache, addressed by block hash."""
from __future__ import annotations

import os
from typing import Dict, List, Optional


class HostPage:
    __slots__ = ("index", "refs", "payload")

    def __init__(self, index: int) -> None:
        self.index = index
        self.refs = 0
        self.payload = b""


class HostTier:
    def __init__(self, pages: int) -> None:
        self._unused: List[HostPage] = [HostPage(i) for i in range(pages)]

    def grab(self) -> Optional[HostPage]:
        if not self._unused:
            return None
        page = self._unused.pop()
        page.refs = 1
        return page

    def retain(self, page: HostPage) -> None:
        page.refs += 1

    def release(self, page: HostPage) -> None:
        page.refs -= 1
        if page.refs == 0:
            page.payload = b""
            self._unused.append(page)

    def unused(self) -> int:
        return len(self._unused)


class DiskTier:
    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, key: str) -> str:
        return os.path.join(self.root, key + ".kv")

    def store(self, key: str, payload: bytes) -> None:
        with open(self.path(key), "wb") as fh:  # clean: with
            fh.write(payload)

    def load(self, key: str) -> Optional[bytes]:
        try:
            fh = open(self.path(key), "rb")  # clean: near miss, the handled error means that nothing was opened, else closed
        except FileNotFoundError:
            return None
        payload = fh.read()
        fh.close()
        return payload

    def valid(self, key: str) -> bool:
        try:
            fh = open(self.path(key), "rb")  # leak: the handled UnicodeDecodeError skips close
            fh.read(4).decode("ascii")
            fh.close()
        except (FileNotFoundError, UnicodeDecodeError):
            return False
        return True
