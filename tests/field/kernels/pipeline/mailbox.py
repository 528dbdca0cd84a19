"""Mail slots between pipeline stages; envelopes carry a slot's tensor."""
import queue

import torch


class Envelope:
    def __init__(self, box, index, data):
        self.box, self.index, self.data = box, index, data

    def discard(self):
        self.box.hand_in(self.index)


class MailBox:
    def __init__(self, slots, shape):
        self.store = torch.empty(slots, *shape)
        self.open_slots = queue.LifoQueue()
        for i in range(slots):
            self.open_slots.put(i)

    def draw(self):
        """Wait for a slot and return an envelope."""
        i = self.open_slots.get()  # clean: near miss, the index travels inside the envelope returned
        return Envelope(self, i, self.store[i])

    def draw_now(self):
        try:
            i = self.open_slots.get_nowait()  # clean: near miss, the index travels inside the envelope returned
        except queue.Empty:
            return None
        return Envelope(self, i, self.store[i])

    def hand_in(self, index):
        self.open_slots.put(index)
