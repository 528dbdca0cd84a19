from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .pools import BlockStore, BootstrapRooms

log = logging.getLogger(__name__)


@dataclass
class Handover:
    rid: str
    room: int
    blocks: list[int] = field(default_factory=list)
    peer: str | None = None


class RoomRegistry:
    def __init__(self, rooms: BootstrapRooms, store: BlockStore):
        self.rooms = rooms
        self.store = store
        self.by_rid: dict[str, Handover] = {}

    def start(self, rid: str, blocks: list[int], peer: str) -> Handover | None:
        room = self.rooms.enter(rid)  # clean: near miss, -1 means no room was entered, else the handover owns it
        if room < 0:
            return None
        held = self.store.hold(blocks)  # clean: owned by the handover, finish drops it
        ho = Handover(rid, room, held, peer)
        self.by_rid[rid] = ho
        return ho

    def start_if_known(self, rid: str, blocks: list[int], peers: dict[str, str]) -> Handover | None:
        room = self.rooms.enter(rid)  # leak: an unknown decode peer returns without leaving the room
        if room < 0:
            return None
        peer = peers.get(rid)
        if peer is None:
            log.warning("no decode peer for %s", rid)
            return None
        ho = Handover(rid, room, self.store.hold(blocks), peer)  # clean: owned by the handover, finish drops it
        self.by_rid[rid] = ho
        return ho

    def finish(self, rid: str) -> None:
        ho = self.by_rid.pop(rid, None)  # clean: its room and blocks are given back below
        if ho is None:
            return
        self.rooms.exit(ho.room)
        self.store.drop(ho.blocks)

    def rehome(self, rid: str, peer: str) -> Handover | None:
        """The decode host went away: same blocks, new room, new peer."""
        old = self.by_rid.pop(rid, None)  # leak: the old room is never exited
        if old is None:
            return None
        room = self.rooms.enter(rid)  # clean: near miss, owned by the new handover, which finish closes
        if room < 0:
            self.rooms.exit(old.room)
            self.store.drop(old.blocks)
            return None
        self.by_rid[rid] = Handover(rid, room, old.blocks, peer)
        return self.by_rid[rid]
