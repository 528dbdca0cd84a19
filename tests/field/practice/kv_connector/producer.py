import logging
from typing import Dict, List, Optional

import torch

from .transport import Channel, ChannelCache, PageArena

logger = logging.getLogger(__name__)


class KVProducer:
    def __init__(self, arena: PageArena, channels: ChannelCache):
        self.arena = arena
        self.channels = channels
        self.unacked: Dict[int, List[int]] = {}
        self._seq = 0

    def _pack(self, layers: List[torch.Tensor]) -> List[int]:
        pages = self.arena.get_pages(len(layers))  # clean: handed to the caller
        for p, l in zip(pages, layers):
            self.arena.data[p, : l.numel()] = l.flatten()
        return pages

    def send(self, peer: str, layers: List[torch.Tensor]) -> int:
        pages = self._pack(layers)  # clean: kept until the ack, on_ack() and reset() put them back
        ch = self.channels.open_channel(peer)  # clean: closed right after the sends
        for p in pages:
            ch.send(self.arena.data[p])
        self.channels.close_channel(ch)
        self._seq += 1
        self.unacked[self._seq] = pages
        return self._seq

    def on_ack(self, seq: int) -> None:
        pages = self.unacked.pop(seq, None)
        if pages is None:
            logger.debug("late ack %d", seq)
            return
        self.arena.put_pages(pages)

    def reset(self) -> None:
        for pages in self.unacked.values():
            self.arena.put_pages(pages)
        self.unacked.clear()

    def send_now(self, peer: str, layers: List[torch.Tensor]) -> bool:
        pages = self._pack(layers)  # leak: a refused send returns with the pages
        ch = self.channels.open_channel(peer)  # clean: near miss, closed before the check
        ok = all([ch.send(self.arena.data[p]) for p in pages])
        self.channels.close_channel(ch)
        if not ok:
            return False
        self.arena.put_pages(pages)
        return True

    def broadcast(self, peers: List[str], layers: List[torch.Tensor]) -> int:
        pages = self._pack(layers)  # clean: put back after the loop, which only continues
        n = 0
        for peer in peers:
            ch = self.channels.open_channel(peer)  # leak: continue on a failed send skips the close
            if not ch.send(self.arena.data[pages[0]]):
                continue
            n += 1
            self.channels.close_channel(ch)
        self.arena.put_pages(pages)
        return n

    def peek(self, peer: str) -> int:
        return self.channels.open_channel(peer).sent  # leak: channel is a temporary

    def estimate(self, layers: List[torch.Tensor]) -> Optional[float]:
        pages = self.arena.try_get_pages(len(layers))  # clean: near miss, the early return has no pages
        if not pages:
            return None
        mean = float(self.arena.data[pages].mean())
        self.arena.put_pages(pages)
        return mean
