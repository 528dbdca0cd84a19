from __future__ import annotations

import logging
from typing import Callable, Dict, List, Optional

from .channels import Channel, ChannelTable
from .flow import Share, Window

log = logging.getLogger(__name__)


class Pusher:
    def __init__(self, table: ChannelTable, window: Window) -> None:
        self.table = table
        self.window = window
        self.open: Dict[str, Channel] = {}

    def push(self, peer: str, data: bytes) -> bool:
        ch = self.table.seize(peer)  # clean: unseized in the finally
        if ch is None:
            return False
        try:
            with Share(self.window, len(data)) as ok:  # clean: Share credits it
                if not ok:
                    return False
                return ch.post(data) == len(data)
        finally:
            self.table.unseize(ch)

    def push_windowed(self, peer: str, data: bytes) -> bool:
        if not self.window.admit(len(data), timeout=0.5):  # leak: without a channel the bytes are not credited
            return False
        ch = self.table.seize(peer)  # clean: unseized after the post
        if ch is None:
            return False
        n = ch.post(data)
        self.table.unseize(ch)
        self.window.credit(len(data))
        return n == len(data)

    def begin(self, sid: str, peer: str) -> bool:
        if sid in self.open:
            return True
        ch = self.table.seize(peer)  # clean: near miss, in self.open until end()
        if ch is None:
            return False
        self.open[sid] = ch
        return True

    def part(self, sid: str, data: bytes) -> bool:
        return self.open[sid].post(data) == len(data)

    def end(self, sid: str) -> None:
        ch = self.open.pop(sid, None)
        if ch is not None:
            self.table.unseize(ch)

    def push_any(self, peers: List[str], data: bytes) -> Optional[str]:
        for peer in peers:
            ch = self.table.seize(peer)  # leak: a short post goes on to the next peer with the channel seized
            if ch is None:
                continue
            if ch.post(data) < len(data):
                ch.healthy = False
                log.warning("short post to %s", peer)
                continue
            self.table.unseize(ch)
            return peer
        return None

    def push_then(self, peer: str, data: bytes, run: Callable[[Callable[[], None]], None]) -> bool:
        ch = self.table.seize(peer)  # clean: near miss, the submitted job unseizes it
        if ch is None:
            return False

        def job() -> None:
            try:
                ch.post(data)
            finally:
                self.table.unseize(ch)

        run(job)
        return True
