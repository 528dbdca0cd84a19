"""The decode side: landing windows, active slots, and moving work between workers."""
from __future__ import annotations

from dataclasses import dataclass

from .pools import SlotPool, Window, WindowRegistry


@dataclass
class Incoming:
    slot: int
    landing: Window


@dataclass
class Active:
    rid: str
    slot: int
    step: int = 0


class DecodeWorker:
    """Each worker has slots of its own; a peer's numbers mean nothing here."""

    def __init__(self, name: str, slots: SlotPool, windows: WindowRegistry, link) -> None:
        self.name = name
        self.slots = slots
        self.windows = windows
        self.link = link
        self.receiving: dict[str, Incoming] = {}
        self.active: dict[str, Active] = {}
        self.beams: dict[str, Active] = {}

    def expect(self, rid: str, nbytes: int) -> bool:
        if rid in self.receiving or rid in self.active:
            return True
        slot = self.slots.borrow()  # leak: hand_over deletes the entry, this worker's slot is not restored
        if slot is None:
            return False
        landing = self.windows.register(nbytes)  # clean: near miss, arrived and give_up both deregister it
        self.receiving[rid] = Incoming(slot, landing)
        return True

    def arrived(self, rid: str) -> None:
        incoming = self.receiving.pop(rid)
        self.windows.deregister(incoming.landing)
        self.active[rid] = Active(rid, incoming.slot)

    def give_up(self, rid: str) -> None:
        incoming = self.receiving.pop(rid, None)
        if incoming is None:
            return
        self.windows.deregister(incoming.landing)
        self.slots.restore(incoming.slot)

    def hand_over(self, peer: "DecodeWorker", rid: str) -> bool:
        source = self.active[rid]
        target = peer.slots.borrow()  # leak: the peer may hand it over in turn and lose it the same way
        if target is None:
            return False
        self.link.copy(self.name, source.slot, peer.name, target)
        peer.active[rid] = Active(rid, target, source.step)
        del self.active[rid]
        return True

    def fork_beam(self, rid: str, beam: str) -> bool:
        if beam in self.beams:
            return True
        slot = self.slots.borrow()  # clean: near miss, moving the beam restores the old side's slot
        if slot is None:
            return False
        self.link.copy(self.name, self.active[rid].slot, self.name, slot)
        self.beams[beam] = Active(rid, slot)
        return True

    def move_beam(self, peer: "DecodeWorker", beam: str) -> bool:
        if beam in peer.beams:
            return False
        target = peer.slots.borrow()  # clean: kept in the peer's beams until end_beam or the next move
        if target is None:
            return False
        source = self.beams.pop(beam)
        self.link.copy(self.name, source.slot, peer.name, target)
        peer.beams[beam] = Active(source.rid, target, source.step)
        self.slots.restore(source.slot)
        return True

    def end_beam(self, beam: str) -> None:
        self.slots.restore(self.beams.pop(beam).slot)

    def finish(self, rid: str) -> int:
        done = self.active.pop(rid)
        self.slots.restore(done.slot)
        return done.step
