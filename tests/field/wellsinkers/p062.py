"""Descriptors of a DMA ring: got from the ring, posted to the device or put back."""
import numpy as np

DESC = np.dtype([("addr", "u8"), ("len", "u4"), ("flags", "u2"), ("owner", "u1")])
SOFT, HELD, DEVICE = 0, 1, 2


class TxRing:
    def __init__(self, n):
        self.ring = np.zeros(n, dtype=DESC)
        self.cursor = 0

    def get_desc(self):
        n = len(self.ring)
        for step in range(n):
            i = (self.cursor + step) % n
            if self.ring[i]["owner"] == SOFT:
                self.ring[i]["owner"] = HELD
                self.cursor = (i + 1) % n
                return i
        return -1

    def post(self, i, addr, length, flags=0):
        self.ring[i] = (addr, length, flags, DEVICE)

    def put_desc(self, i):
        self.ring[i]["owner"] = SOFT

    def on_interrupt(self, done):
        self.ring["owner"][done] = SOFT


class Nic:
    def __init__(self, tx, iommu):
        self.tx = tx
        self.iommu = iommu

    def send(self, frame):
        i = self.tx.get_desc()  # clean: posted or put back
        if i < 0:
            return False
        addr = self.iommu.map(frame)
        if addr is None:
            self.tx.put_desc(i)
            return False
        self.tx.post(i, addr, len(frame))
        return True

    def send_padded(self, frame, scratch):
        i = self.tx.get_desc()  # leak: giant frames leave the descriptor held
        if i < 0:
            return False
        if len(frame) > 9000:
            return False
        scratch[: len(frame)] = frame
        self.tx.post(i, self.iommu.map(scratch), max(60, len(frame)))
        return True

    def has_room(self):
        if (i := self.tx.get_desc()) >= 0:  # clean: put back at once
            self.tx.put_desc(i)
        return i >= 0


def burst(nic, frames):
    held = [nic.tx.get_desc() for _ in frames]  # leak: only the mapped ones are posted
    for i, frame in zip(held, frames):
        addr = nic.iommu.map(frame)
        if i >= 0 and addr is not None:
            nic.tx.post(i, addr, len(frame))
