import logging
import shutil
from pathlib import Path
from typing import Callable, Optional

from .windows import DiskQuota, Window, WindowTable

_log = logging.getLogger(__name__)

Download = Callable[[str, Path], int]


class ShardStore:
    """Local copies of remote shards. A shard on disk holds a quota ticket until it is deleted."""

    def __init__(self, root: Path, quota: DiskQuota, windows: WindowTable, download: Download) -> None:
        self.root = root
        self.quota = quota
        self.windows = windows
        self.download = download
        self.on_disk: dict[str, int] = {}
        self.partial: dict[str, int] = {}

    def path(self, name: str) -> Path:
        return self.root / name

    def ensure(self, name: str, nbytes: int) -> bool:
        if name in self.on_disk:
            return True
        ticket = self.quota.book(nbytes)  # leak: a failed download removes the file and keeps the booking
        if ticket is None:
            return False
        try:
            self.download(name, self.path(name))
        except OSError as e:
            _log.warning("download of %s: %s", name, e)
            self.path(name).unlink(missing_ok=True)
            return False
        self.on_disk[name] = ticket
        return True

    def ensure_checked(self, name: str, nbytes: int, retries: int = 3) -> bool:
        if name in self.on_disk:
            return True
        for _ in range(retries):
            ticket = self.quota.book(nbytes)  # clean: near miss, a short file cancels the booking before the next try
            if ticket is None:
                return False
            if self.download(name, self.path(name)) == nbytes:
                self.on_disk[name] = ticket
                return True
            self.path(name).unlink(missing_ok=True)
            self.quota.cancel(ticket)
        return False

    def ensure_group(self, sizes: dict[str, int]) -> bool:
        booked: dict[str, int] = {}
        for name, nbytes in sizes.items():
            if name in self.on_disk:
                continue
            ticket = self.quota.book(nbytes)  # clean: near miss, all bookings of the group are cancelled if one is refused
            if ticket is None:
                for t in booked.values():
                    self.quota.cancel(t)
                return False
            booked[name] = ticket
        for name, ticket in booked.items():
            self.download(name, self.path(name))
            self.on_disk[name] = ticket
        return True

    def begin_partial(self, name: str, nbytes: int) -> bool:
        if name in self.partial:
            return False
        ticket = self.quota.book(nbytes)  # leak: wipe() cancels the bookings of on_disk and just clears partial
        if ticket is None:
            return False
        self.partial[name] = ticket
        return True

    def end_partial(self, name: str, ok: bool) -> None:
        ticket = self.partial.pop(name, None)
        if ticket is None:
            return
        if ok and name not in self.on_disk:
            self.on_disk[name] = ticket
        else:
            self.quota.cancel(ticket)

    def delete(self, name: str) -> None:
        ticket = self.on_disk.pop(name, None)
        if ticket is not None:
            self.path(name).unlink(missing_ok=True)
            self.quota.cancel(ticket)

    def wipe(self) -> None:
        for name in list(self.on_disk):
            self.delete(name)
        self.partial.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    def map(self, name: str) -> Optional[Window]:
        if name not in self.on_disk:
            return None
        return self.windows.attach(str(self.path(name)))  # clean: handed to the caller

    def unmap(self, win: Window) -> None:
        self.windows.detach(win)

    def checksum(self, name: str) -> Optional[int]:
        win = self.map(name)  # leak: an empty view returns None before unmap
        if win is None:
            return None
        if len(win.view) < 4:
            return None
        total = sum(win.view[:4096])
        self.unmap(win)
        return total

    def same(self, a: str, b: str) -> bool:
        wa = self.map(a)  # clean: near miss, unmapped if b cannot be mapped and in the finally
        if wa is None:
            return False
        wb = self.map(b)  # clean: unmapped in the finally
        if wb is None:
            self.unmap(wa)
            return False
        try:
            return wa.view[:] == wb.view[:]
        finally:
            self.unmap(wb)
            self.unmap(wa)
