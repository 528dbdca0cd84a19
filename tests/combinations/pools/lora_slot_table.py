# take: P.mount(key)
# give: P.unmount(key)
# gets: answer
# type: AdapterSlotTable
import logging

log = logging.getLogger("lora")


class AdapterSlotTable:
    def __init__(self, max_loras):
        self.slot_to_name = [None] * max_loras
        self.users = {}

    def _slot_of(self, name):
        for i, n in enumerate(self.slot_to_name):
            if n == name:
                return i
        return None

    def mount(self, name):
        """True when the adapter has a GPU slot after the call."""
        if self._slot_of(name) is None:
            hole = self._slot_of(None)
            if hole is None:
                log.info("no LoRA slot for %s", name)
                return False
            self.slot_to_name[hole] = name
            self.users[name] = 0
        self.users[name] += 1
        return True

    def unmount(self, name):
        left = self.users[name] - 1
        if left:
            self.users[name] = left
            return
        del self.users[name]
        self.slot_to_name[self._slot_of(name)] = None
