# take: P.wait_for_room(n)
# give: P.free_room(n)
# gets: nothing
# type: BatchTokenGate
import threading


class BatchTokenGate:
    def __init__(self, max_num_batched_tokens):
        self.remaining = max_num_batched_tokens
        self._max = max_num_batched_tokens
        self._room = threading.Condition()
        self.waits = 0

    def wait_for_room(self, tokens):
        if tokens > self._max:
            raise ValueError(f"{tokens} tokens exceed the batch limit {self._max}")
        with self._room:
            if self.remaining < tokens:
                self.waits += 1
                self._room.wait_for(lambda: self.remaining >= tokens)
            self.remaining -= tokens

    def free_room(self, tokens):
        with self._room:
            if self.remaining + tokens > self._max:
                raise ValueError("room freed twice")
            self.remaining += tokens
            self._room.notify_all()
