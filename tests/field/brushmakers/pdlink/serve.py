from __future__ import annotations

from typing import Dict, Iterator, List, Optional

from .channels import Channel, ChannelTable
from .flow import BurstShare, Window


class PullServer:
    """Answers pulls of decode workers."""

    def __init__(self, table: ChannelTable, window: Window, store) -> None:
        self.table = table
        self.window = window
        self.store = store
        self.sessions: Dict[int, Channel] = {}

    def attach(self, sess: int, peer: str) -> bool:
        ch = self.table.seize(peer)  # leak: a session number in use returns False with the channel seized
        if ch is None or sess in self.sessions:
            return False
        self.sessions[sess] = ch
        return True

    def detach(self, sess: int) -> None:
        ch = self.sessions.pop(sess, None)
        if ch is not None:
            self.table.unseize(ch)

    def answer(self, peer: str, keys: List[str]) -> Iterator[int]:
        ch = self.table.seize(peer)  # clean: the generator's finally unseizes it
        if ch is None:
            return
        try:
            for k in keys:
                blob = self.store.get(k)
                if blob is None:
                    continue
                yield ch.post(blob)
        finally:
            self.table.unseize(ch)

    def burst(self, ch: Channel, blobs: List[bytes]) -> int:
        with BurstShare(self.window, sum(map(len, blobs))) as share:  # leak: an unhealthy channel sends nothing and the bytes are not credited
            for b in blobs:
                share.sent += ch.post(b)
            return share.sent

    def ping(self, peer: str) -> Optional[bool]:
        ch = self.table.seize_healthy(peer)  # clean: unseized before the answer
        if ch is None:
            return None
        ok = ch.post(b"\x00") == 1
        self.table.unseize(ch)
        return ok
