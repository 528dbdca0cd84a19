# take: P.acquire()
# give: P.release(X)
# gets: value
# type: PinnedSlotPool
import abc


class SlotPoolBase(abc.ABC):
    def __init__(self, capacity):
        self.capacity = capacity
        self._slots = []
        self._created = 0

    @abc.abstractmethod
    def _create(self, index): ...

    @abc.abstractmethod
    def _reset(self, slot): ...

    def acquire(self):
        if self._slots:
            return self._slots.pop(0)
        if self._created >= self.capacity:
            raise RuntimeError(f"{type(self).__name__} exhausted ({self.capacity})")
        slot = self._create(self._created)
        self._created += 1
        return slot

    def release(self, slot):
        self._reset(slot)
        self._slots.append(slot)


class PinnedSlotPool(SlotPoolBase):
    def __init__(self, capacity, slot_len):
        super().__init__(capacity)
        self.slot_len = slot_len

    def _create(self, index):
        return {"index": index, "data": bytearray(self.slot_len), "valid": 0}

    def _reset(self, slot):
        slot["valid"] = 0
