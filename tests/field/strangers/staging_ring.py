"""Host-to-device staging with a fixed number of slots and completion callbacks."""
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial


class StagingSlots:
    def __init__(self, n, nbytes):
        self._free = [bytearray(nbytes) for _ in range(n)]

    def rent(self):
        return self._free.pop() if self._free else bytearray(1024)

    def return_(self, slot):
        self._free.append(slot)


class Uploader:
    def __init__(self, slots: StagingSlots, workers: int = 2):
        self.slots = slots
        self.executor = ThreadPoolExecutor(workers)
        self.after = []

    def upload_async(self, payload: bytes) -> Future:
        slot = self.slots.rent()  # clean: near miss, the completion callback returns it
        slot[: len(payload)] = payload
        future = self.executor.submit(bytes, slot)
        future.add_done_callback(lambda _f: self.slots.return_(slot))
        return future

    def upload_deferred(self, payload: bytes) -> int:
        slot = self.slots.rent()  # clean: near miss, a partial in self.after is called by settle
        slot[: len(payload)] = payload
        self.after.append(partial(self.slots.return_, slot))
        return len(payload)

    def settle(self) -> None:
        while self.after:
            self.after.pop()()

    def upload_checked(self, payload: bytes, limit: int) -> bool:
        slot = self.slots.rent()  # leak: the undo callback is built but not called on the oversize path
        undo = partial(self.slots.return_, slot)
        if len(payload) > limit:
            return False
        slot[: len(payload)] = payload
        undo()
        return True

    def upload_twice(self, a: bytes, b: bytes) -> int:
        slot = self.slots.rent()  # leak: the name is rebound to a second slot before it goes back
        slot[: len(a)] = a
        first = sum(slot)
        slot = self.slots.rent()  # clean: returned at the end
        slot[: len(b)] = b
        second = sum(slot)
        self.slots.return_(slot)
        return first + second

    def upload_reusing(self, a: bytes, b: bytes) -> int:
        slot = self.slots.rent()  # clean: near miss, returned before the name is rebound
        slot[: len(a)] = a
        first = sum(slot)
        self.slots.return_(slot)
        slot = self.slots.rent()  # clean: near miss, the same name again, returned at the end
        slot[: len(b)] = b
        second = sum(slot)
        self.slots.return_(slot)
        return first + second
