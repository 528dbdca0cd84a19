"""Device mutexes of several GPUs, entered together with an ExitStack."""
import contextlib
import threading


class DeviceGuard:
    def __init__(self, device):
        self.device = device
        self._lock = threading.Lock()
        self.owner = None

    def enter_device(self):
        self._lock.acquire()
        self.owner = threading.get_ident()
        return self.device

    def exit_device(self):
        self.owner = None
        self._lock.release()

    @contextlib.contextmanager
    def hold(self):
        self.enter_device()
        try:
            yield self.device
        finally:
            self.exit_device()


class Resharder:
    def __init__(self, guards: "list[DeviceGuard]", gpu):
        self.guards = guards
        self.gpu = gpu

    def reshard(self, tensors):
        with contextlib.ExitStack() as stack:
            devices = [stack.enter_context(g.hold()) for g in self.guards]  # clean: the ExitStack leaves it
            self.gpu.all_to_all(devices, tensors)

    def move(self, i, tensor):
        device = self.guards[i].enter_device()  # clean: exit in finally
        try:
            return tensor.to(device)
        finally:
            self.guards[i].exit_device()

    def move_if_fits(self, i, tensor):
        guard = self.guards[i]
        device = guard.enter_device()  # leak: no room, returns with the device locked
        if self.gpu.free(device) < tensor.nbytes:
            return None
        out = tensor.to(device)
        guard.exit_device()
        return out

    def trim(self):
        for guard in self.guards:
            device = guard.enter_device()  # leak: an idle device continues without exit
            if self.gpu.reserved(device) == 0:
                continue
            self.gpu.empty_cache(device)
            guard.exit_device()

    def stats(self, i):
        with self.guards[i].hold() as device:  # clean: with
            return self.gpu.stats(device)
