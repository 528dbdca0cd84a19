"""The prefill side: computes KV into a slot, then exposes it to the decode side."""
from __future__ import annotations

from dataclasses import dataclass

from .pools import SlotPool, Window, WindowRegistry


@dataclass
class Transfer:
    rid: str
    slot: int
    window: Window
    done: bool = False


@dataclass
class Snapshot:
    rid: str
    window: Window
    age: int = 0


class PrefillWorker:
    def __init__(self, slots: SlotPool, windows: WindowRegistry, slot_bytes: int) -> None:
        self.slots = slots
        self.windows = windows
        self.slot_bytes = slot_bytes
        self.computing: dict[str, int] = {}
        self.outbox: list[Transfer] = []
        self.snapshots: list[Snapshot] = []
        self.chunked: dict[str, list[Window]] = {}

    def start(self, rid: str) -> bool:
        if rid in self.computing:
            return True
        slot = self.slots.borrow()  # clean: near miss, ship moves it, sweep and cancel restore it
        if slot is None:
            return False
        self.computing[rid] = slot
        return True

    def cancel(self, rid: str) -> None:
        slot = self.computing.pop(rid, None)
        if slot is not None:
            self.slots.restore(slot)

    def ship(self, rid: str) -> Transfer:
        slot = self.computing.pop(rid)
        window = self.windows.register(self.slot_bytes)  # leak: sweep filters done ones out with the window
        transfer = Transfer(rid, slot, window)
        self.outbox.append(transfer)
        return transfer

    def acknowledge(self, key: int) -> None:
        for transfer in self.outbox:
            if transfer.window.key == key:
                transfer.done = True

    def sweep(self) -> int:
        before = len(self.outbox)
        for transfer in self.outbox:
            if transfer.done:
                self.slots.restore(transfer.slot)
        self.outbox = [t for t in self.outbox if not t.done]
        return before - len(self.outbox)

    def snapshot(self, rid: str) -> int:
        window = self.windows.register(self.slot_bytes)  # clean: near miss, aged ones are deregistered
        self.snapshots.append(Snapshot(rid, window))
        return window.key

    def age_snapshots(self, limit: int) -> None:
        young = []
        for snap in self.snapshots:
            snap.age += 1
            if snap.age > limit:
                self.windows.deregister(snap.window)
            else:
                young.append(snap)
        self.snapshots = young

    def expose_chunk(self, rid: str, nbytes: int) -> int:
        window = self.windows.register(nbytes)  # leak: finish_chunks ends the last chunk's window only
        self.chunked.setdefault(rid, []).append(window)
        return window.key

    def finish_chunks(self, rid: str) -> int:
        parts = self.chunked.pop(rid)
        last = parts.pop()
        self.windows.deregister(last)
        return sum(p.nbytes for p in parts) + last.nbytes
