"""Messages carry handles; each message kind has its own way of ending them."""
import weakref


class HandleBank:
    def __init__(self):
        self.counter = 0
        self.open_handles = set()

    def open_handle(self):
        self.counter += 1
        self.open_handles.add(self.counter)
        return self.counter

    def close_handle(self, handle):
        self.open_handles.discard(handle)


class Tensor:
    """Python side of a remote tensor; collected with the object."""

    def __init__(self, bank):
        self.handle = bank.open_handle()  # clean: near miss, a finalizer closes it
        self._finalizer = weakref.finalize(self, bank.close_handle, self.handle)


class Dispatcher:
    def __init__(self, bank):
        self.bank = bank
        self.actions = {"drop": self._drop, "keep": self._keep}
        self.kept = []

    def _drop(self, handle):
        self.bank.close_handle(handle)

    def _keep(self, handle):
        self.kept.append(handle)

    def handle(self, kind):
        if kind not in self.actions:
            return False
        handle = self.bank.open_handle()  # clean: near miss, both actions of the table end it or list it for close
        self.actions[kind](handle)
        return True

    def handle_logged(self, kind, log):
        handle = self.bank.open_handle()  # leak: an unknown kind is logged and forgotten
        action = self.actions.get(kind)
        if action is None:
            log.append(kind)
            return False
        action(handle)
        return True

    def batch(self, n):
        handles = [self.bank.open_handle() for _ in range(n)]  # clean: near miss, closed by a map that list() runs
        list(map(self.bank.close_handle, handles))
        return n

    def batch_lazily(self, n):
        handles = [self.bank.open_handle() for _ in range(n)]  # leak: the map is lazy and never run
        map(self.bank.close_handle, handles)
        return n

    def choose(self, fast):
        closer = self._drop if fast else self.bank.close_handle
        handle = self.bank.open_handle()  # clean: near miss, either closer closes it
        value = handle * 2
        closer(handle)
        return value

    def close(self):
        while self.kept:
            self.bank.close_handle(self.kept.pop())
