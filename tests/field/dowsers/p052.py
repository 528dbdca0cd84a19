"""Structured numpy records as the slot table of vision embeddings."""
import numpy as np

SLOT = np.dtype([("busy", "?"), ("uses", "u4"), ("bytes", "u8")])


class EmbedSlots:
    def __init__(self, n):
        self.table = np.zeros(n, dtype=SLOT)

    def open_slot(self, nbytes):
        idle = ~self.table["busy"]
        if not idle.any():
            return None
        fits = np.where(idle, self.table["uses"], np.iinfo("u4").max)
        i = int(fits.argmin())
        self.table[i] = (True, self.table["uses"][i] + 1, nbytes)
        return i

    def shut_slot(self, i):
        self.table["busy"][i] = False
        self.table["bytes"][i] = 0

    @property
    def bytes_in_use(self):
        return int(self.table["bytes"].sum())


class VisionTower:
    def __init__(self, slots: EmbedSlots, vit):
        self.slots = slots
        self.vit = vit

    def encode(self, image):
        i = self.slots.open_slot(image.nbytes)  # clean: the caller gets the slot
        if i is not None:
            self.vit.encode(image, i)
        return i

    def caption(self, image, lm):
        i = self.encode(image)  # clean: shut in finally
        if i is None:
            return ""
        try:
            return lm.generate(i)
        finally:
            self.slots.shut_slot(i)

    def similarity(self, a, b):
        i = self.encode(a)  # clean: shut on both ways after it was opened
        if i is None:
            return None
        j = self.encode(b)  # leak: only the first slot is shut
        if j is None:
            self.slots.shut_slot(i)
            return None
        s = self.vit.dot(i, j)
        self.slots.shut_slot(i)
        return s

    def filter(self, images):
        kept = []
        for image in images:
            i = self.slots.open_slot(image.nbytes)  # leak: a blurred image continues with the slot open
            if i is None or self.vit.blurred(image):
                continue
            self.vit.encode(image, i)
            kept.append(i)
        return kept
