import logging
from typing import Any, List, NamedTuple, Optional

from .resources import Link, LinkTable, MetaSlots

log = logging.getLogger("kvshuttle")


class Channel(NamedTuple):
    link: Link
    slot: int


class Agent:
    def __init__(self, links: LinkTable, slots: MetaSlots) -> None:
        self.links = links
        self.slots = slots

    def open_channel(self, peer: str) -> Optional[Channel]:
        link = self.links.get(peer)  # clean: near miss, put back when there is no slot, else part of the channel
        slot = self.slots.alloc()  # clean: part of the channel, freed by close_channel
        if slot is None:
            self.links.put(link)
            return None
        return Channel(link, slot)

    def close_channel(self, ch: Channel) -> None:
        self.slots.free(ch.slot)
        self.links.put(ch.link)

    def open_verified(self, peer: str) -> Optional[Channel]:
        ch = self.open_channel(peer)  # leak: an unhealthy link yields None and the channel remains open
        if ch is None:
            return None
        if not ch.link.healthy:
            log.warning("link to %s is down", peer)
            return None
        ch.link.sock.send(("hello", ch.slot))
        return ch

    def ping(self, peer: str) -> bool:
        link = self.links.get(peer)  # clean: near miss, the handled timeout returns through the finally
        try:
            link.sock.send(("ping", 0))
            return link.sock.recv() == "pong"
        except TimeoutError:
            link.healthy = False
            return False
        finally:
            self.links.put(link)

    def layout_of(self, peer: str) -> Optional[dict]:
        link = self.links.get(peer)  # leak: a peer without a layout answer returns None and the reference stays counted
        link.sock.send(("layout", 0))
        reply: Any = link.sock.recv()
        if not reply:
            return None
        self.links.put(link)
        return reply

    def fan_out(self, peers: List[str], msg: Any) -> List[str]:
        reached = []
        for peer in peers:
            link = self.links.get(peer)  # clean: near miss, put before the continue and at the end
            if not link.healthy:
                self.links.put(link)
                continue
            link.sock.send(msg)
            reached.append(peer)
            self.links.put(link)
        return reached
