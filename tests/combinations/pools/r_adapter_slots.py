# take: P.pin(key)
# give: P.unpin(key)
# gets: optional
# type: AdapterRack
from collections import OrderedDict


class AdapterRack:
    """LoRA weights in GPU slots. Unpinned adapters stay resident until a slot is wanted."""

    def __init__(self, n_slots, loader=None):
        self._blank = list(range(n_slots))
        self._slot = {}
        self._pins = {}
        self._resting = OrderedDict()
        self._loader = loader or (lambda name, slot: None)

    def _find_room(self):
        if not self._blank and self._resting:
            victim, slot = self._resting.popitem(last=False)
            del self._slot[victim]
            self._blank.append(slot)
        return self._blank.pop() if self._blank else None

    def pin(self, name):
        if name in self._slot:
            self._resting.pop(name, None)
            self._pins[name] = self._pins.get(name, 0) + 1
            return self._slot[name]
        slot = self._find_room()
        if slot is None:
            return None
        try:
            self._loader(name, slot)
        except Exception:
            self._blank.append(slot)
            raise
        self._slot[name] = slot
        self._pins[name] = 1
        return slot

    def unpin(self, name):
        self._pins[name] -= 1
        if self._pins[name] == 0:
            del self._pins[name]
            self._resting[name] = self._slot[name]
