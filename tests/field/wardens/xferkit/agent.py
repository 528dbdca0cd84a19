from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import Optional

from .memory import Region, RegistrationTable

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class XferHandle:
    number: int
    remote: str
    state: str = "INIT"


class TransferAgent:
    def __init__(self, name: str, table: RegistrationTable) -> None:
        self.name = name
        self.table = table
        self.remotes: dict[str, int] = {}
        self.down: set[str] = set()
        self.handles: dict[int, XferHandle] = {}
        self._numbers = itertools.count()

    def add_remote_agent(self, remote: str) -> None:
        self.remotes[remote] = self.remotes.get(remote, 0) + 1

    def remove_remote_agent(self, remote: str) -> None:
        self.remotes[remote] -= 1
        if self.remotes[remote] == 0:
            del self.remotes[remote]

    def make_xfer(self, remote: str) -> XferHandle:
        handle = XferHandle(next(self._numbers), remote)
        self.handles[handle.number] = handle
        return handle

    def release_xfer_handle(self, handle: XferHandle) -> None:
        del self.handles[handle.number]

    def post(self, handle: XferHandle, region: Region) -> bool:
        if handle.remote not in self.remotes or region.key not in self.table.live:
            handle.state = "ERR"
            return False
        handle.state = "DONE"
        return True

    def check(self, handle: XferHandle) -> str:
        return handle.state

    def start_xfer(self, remote: str, region: Region) -> Optional[XferHandle]:
        handle = self.make_xfer(remote)  # clean: near miss, released when the post is refused, else handed to the caller
        if not self.post(handle, region):
            self.release_xfer_handle(handle)
            return None
        return handle

    def ping(self, remote: str) -> bool:
        handle = self.make_xfer(remote)  # leak: a remote that is down returns False before the release
        if remote in self.down:
            logger.warning("%s cannot reach %s", self.name, remote)
            return False
        handle.state = "DONE"
        self.release_xfer_handle(handle)
        return True
