# take: P.bring_in(key)
# give: P.let_go(key)
# gets: optional
# type: ExpertResidency
from collections import OrderedDict


class ExpertResidency:
    """GPU slots for offloaded MoE experts. Idle experts stay until their slot is wanted."""

    def __init__(self, n_slots):
        self._blank = list(range(n_slots))
        self._idle = OrderedDict()
        self._active = {}

    def _slot_for(self, expert):
        if expert in self._idle:
            return self._idle.pop(expert)
        if self._blank:
            return self._blank.pop()
        if self._idle:
            _, slot = self._idle.popitem(last=False)
            return slot
        return None

    def bring_in(self, expert):
        if expert in self._active:
            self._active[expert][1] += 1
            return self._active[expert][0]
        slot = self._slot_for(expert)
        if slot is not None:
            self._active[expert] = [slot, 1]
        return slot

    def let_go(self, expert):
        entry = self._active[expert]
        entry[1] -= 1
        if entry[1] == 0:
            del self._active[expert]
            self._idle[expert] = entry[0]
