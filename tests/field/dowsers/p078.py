"""A lock for each layer's optimizer state, made when first asked for."""
import threading


class LayerLocks:
    def __init__(self):
        self._table = {}
        self._users = {}
        self._guard = threading.Lock()

    def lock_layer(self, layer):
        with self._guard:
            lock = self._table.setdefault(layer, threading.Lock())
            self._users[layer] = self._users.get(layer, 0) + 1
        lock.acquire()

    def unlock_layer(self, layer):
        with self._guard:
            self._table[layer].release()
            self._users[layer] -= 1
            if not self._users[layer]:
                del self._users[layer], self._table[layer]


class CpuAdam:
    def __init__(self, locks: LayerLocks, state):
        self.locks = locks
        self.state = state

    def step(self, layer, grad):
        self.locks.lock_layer(layer)  # clean: finally
        try:
            self.state[layer].update(grad)
        finally:
            self.locks.unlock_layer(layer)

    def step_if_due(self, layer, grad, tick):
        self.locks.lock_layer(layer)  # leak: not due, returns with the layer locked
        if tick % self.state[layer].every:
            return False
        self.state[layer].update(grad)
        self.locks.unlock_layer(layer)
        return True

    def save(self, sink):
        for layer in sorted(self.state):
            self.locks.lock_layer(layer)  # clean: unlocked in each turn
            sink.write(layer, self.state[layer].dump())
            self.locks.unlock_layer(layer)

    def has_overflow(self, layers):
        bad = False
        for layer in layers:
            self.locks.lock_layer(layer)  # leak: the break at the overflow keeps the lock
            if self.state[layer].has_inf():
                bad = True
                break
            self.locks.unlock_layer(layer)
        return bad

    def begin_swap(self, layer):
        self.locks.lock_layer(layer)  # clean: end_swap() unlocks
        self.swapping = layer

    def end_swap(self):
        self.locks.unlock_layer(self.swapping)
