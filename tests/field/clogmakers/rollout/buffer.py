import collections
from dataclasses import dataclass, field


class BufferFull(Exception):
    pass


@dataclass
class Slot:
    index: int
    group: str
    samples: list = field(default_factory=list)

    @property
    def rewards(self):
        return [s["reward"] for s in self.samples]


class GroupBuffer:
    """Groups of trajectories of one prompt, in slots that the trainer reads in order."""

    def __init__(self, slots):
        self._free = collections.deque(range(slots))
        self._open = {}
        self._complete = collections.deque()

    def reserve(self, group):
        if not self._free:
            raise BufferFull(group)
        slot = Slot(self._free.popleft(), group)  # clean: part of the slot that is returned
        self._open[slot.index] = slot
        return slot

    def commit(self, slot):
        del self._open[slot.index]
        self._complete.append(slot)

    def cancel(self, slot):
        if self._open.pop(slot.index, None) is not None:
            self._free.append(slot.index)

    def drain(self, n):
        """The oldest n groups for the trainer, their slots are free again."""
        out = []
        while self._complete and len(out) < n:
            slot = self._complete.popleft()
            self._free.append(slot.index)
            out.append(slot)
        return out
