"""A ring of shared memory slots between the decoding threads and the inference thread."""
from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import Callable, Optional

log = logging.getLogger("frame_ring")
NO_SLOT = -1


class SlotRing:
    """Slots are claimed by a producer and recycled by whoever sees the frame last."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.memory = memoryview(bytearray(slots * slot_bytes))
        self._free: "queue.SimpleQueue[int]" = queue.SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)

    def claim(self, timeout: float = 0.05) -> int:
        try:
            return self._free.get(timeout=timeout)
        except queue.Empty:
            return NO_SLOT

    def recycle(self, slot: int) -> None:
        self._free.put(slot)

    def view(self, slot: int) -> memoryview:
        return self.memory[slot * self.slot_bytes:(slot + 1) * self.slot_bytes]

    def claim_patient(self, deadline: float) -> int:
        """Tries until the deadline."""
        while time.monotonic() < deadline:
            slot = self.claim()  # clean: near miss, the loop goes on only when there was none
            if slot != NO_SLOT:
                return slot
        return NO_SLOT


@dataclass
class Frame:
    camera: str
    stamp: float
    slot: int
    size: int


class Producer(threading.Thread):
    def __init__(self, ring: SlotRing, out: "queue.Queue[Frame]", camera: str, source) -> None:
        super().__init__(daemon=True)
        self.ring = ring
        self.out = out
        self.camera = camera
        self.source = source
        self.dropped = 0

    def run(self) -> None:
        for packet in self.source:
            slot = self.ring.claim()  # clean: recycled when the packet is too large, else travels with the frame
            if slot == NO_SLOT:
                self.dropped += 1
                continue
            if len(packet) > self.ring.slot_bytes:
                self.ring.recycle(slot)
                self.dropped += 1
                continue
            self.ring.view(slot)[: len(packet)] = packet
            self.out.put(Frame(self.camera, time.time(), slot, len(packet)))


class SampledProducer(Producer):
    """Keeps one frame of a few."""

    every = 5

    def run(self) -> None:
        for index, packet in enumerate(self.source):
            slot = self.ring.claim()  # leak: a frame that is not sampled keeps its slot
            if slot == NO_SLOT:
                self.dropped += 1
                continue
            self.ring.view(slot)[: len(packet)] = packet
            if index % self.every != 0:
                self.dropped += 1
                continue
            self.out.put(Frame(self.camera, time.time(), slot, len(packet)))


class BurstProducer(Producer):
    """Waits for a slot, gives up for good when the consumer is stuck."""

    def run(self) -> None:
        for packet in self.source:
            slot = self.ring.claim_patient(time.monotonic() + 2.0)  # clean: near miss, nothing is held at the break
            if slot == NO_SLOT:
                log.error("camera %s gives up", self.camera)
                break
            self.ring.view(slot)[: len(packet)] = packet
            frame = Frame(self.camera, time.time(), slot, len(packet))
            if not self._offer(frame):
                self.ring.recycle(frame.slot)

    def _offer(self, frame: Frame) -> bool:
        try:
            self.out.put(frame, timeout=0.5)
        except queue.Full:
            self.dropped += 1
            return False
        return True


class Consumer:
    def __init__(self, ring: SlotRing, inbox: "queue.Queue[Frame]", model: Callable[[bytes], dict]) -> None:
        self.ring = ring
        self.inbox = inbox
        self.model = model
        self.latest: dict[str, int] = {}
        self.stills: dict[str, int] = {}
        self.results: list[dict] = []

    def step(self) -> bool:
        try:
            frame = self.inbox.get(timeout=0.1)
        except queue.Empty:
            return False
        data = bytes(self.ring.view(frame.slot)[: frame.size])
        self.ring.recycle(frame.slot)
        self.results.append(self.model(data))
        return True

    def snapshot(self, camera: str, payload: bytes) -> bool:
        """Keeps one picture of each camera, the newest."""
        slot = self.ring.claim()  # clean: near miss, the picture before is recycled, forget() ends the last
        if slot == NO_SLOT:
            return False
        self.ring.view(slot)[: len(payload)] = payload
        before = self.latest.get(camera, NO_SLOT)
        self.latest[camera] = slot
        if before != NO_SLOT:
            self.ring.recycle(before)
        return True

    def forget(self, camera: str) -> None:
        slot = self.latest.pop(camera, NO_SLOT)
        if slot != NO_SLOT:
            self.ring.recycle(slot)
        still = self.stills.pop(camera, NO_SLOT)
        if still != NO_SLOT:
            self.ring.recycle(still)

    def set_still(self, camera: str, payload: bytes) -> bool:
        """Background picture of a camera."""
        slot = self.ring.claim()  # leak: the still that the camera had before is overwritten
        if slot == NO_SLOT:
            return False
        self.ring.view(slot)[: len(payload)] = payload
        self.stills[camera] = slot
        return True

    def thumbnail(self, payload: bytes, step: int) -> Optional[bytes]:
        slot = self.ring.claim()  # leak: the copy is returned, the slot is not recycled
        if slot == NO_SLOT:
            return None
        view = self.ring.view(slot)
        view[: len(payload)] = payload
        return bytes(view[: len(payload)])[::step]

    def rotate(self, payload: bytes, turns: int) -> Optional[bytes]:
        slot = self.ring.claim()  # leak: recycled for a positive number of turns only
        if slot == NO_SLOT:
            return None
        view = self.ring.view(slot)
        view[: len(payload)] = payload
        out = bytes(view[: len(payload)])
        while turns > 0:
            out = out[1:] + out[:1]
            turns -= 1
            if turns == 0:
                self.ring.recycle(slot)
        return out

    def checksum(self, payload: bytes) -> int:
        slot = self.ring.claim()  # clean: near miss, recycled in the else of the test
        total = 0
        if slot == NO_SLOT:
            total = sum(payload)
        else:
            view = self.ring.view(slot)
            view[: len(payload)] = payload
            total = sum(view[: len(payload)])
            self.ring.recycle(slot)
        return total % 65521


class Tee:
    """Sends each frame to two inboxes; the second reader of a frame recycles it."""

    def __init__(self, ring: SlotRing, left: "queue.Queue[Frame]", right: "queue.Queue[Frame]") -> None:
        self.ring = ring
        self.left = left
        self.right = right
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    def send(self, camera: str, payload: bytes) -> bool:
        slot = self.ring.claim()  # clean: near miss, done() recycles it after both readers
        if slot == NO_SLOT:
            return False
        self.ring.view(slot)[: len(payload)] = payload
        frame = Frame(camera, time.time(), slot, len(payload))
        self.left.put(frame)
        self.right.put(frame)
        return True

    def done(self, frame: Frame) -> None:
        with self._lock:
            if frame.slot not in self._seen:
                self._seen.add(frame.slot)
                return
            self._seen.discard(frame.slot)
        self.ring.recycle(frame.slot)
