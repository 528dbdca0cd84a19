"""CUDA IPC handles opened from peers, with a Counter of the opens."""
from collections import Counter


class IpcRegistry:
    def __init__(self, driver):
        self._driver = driver
        self._opens = Counter()
        self._ptr = {}

    def open_ipc(self, name):
        if not self._opens[name]:
            self._ptr[name] = self._driver.ipc_open(name)
        self._opens[name] += 1
        return self._ptr[name]

    def close_ipc(self, name):
        self._opens[name] -= 1
        if self._opens[name] == 0:
            del self._opens[name]
            self._driver.ipc_close(self._ptr.pop(name))


class PeerWeights:
    def __init__(self, registry: IpcRegistry, gpu):
        self.registry = registry
        self.gpu = gpu
        self.attached = []

    def sync(self, name, dst):
        ptr = self.registry.open_ipc(name)  # clean: closed in finally
        try:
            self.gpu.copy(dst, ptr)
        finally:
            self.registry.close_ipc(name)

    def sync_if_newer(self, name, dst, version):
        ptr = self.registry.open_ipc(name)  # leak: up to date, returns without close_ipc
        if self.gpu.read_version(ptr) <= version:
            return False
        self.gpu.copy(dst, ptr)
        self.registry.close_ipc(name)
        return True

    def attach(self, name):
        ptr = self.registry.open_ipc(name)  # clean: name kept in attached, detach_all() closes
        self.attached.append(name)
        return ptr

    def detach_all(self):
        for name in self.attached:
            self.registry.close_ipc(name)
        self.attached.clear()

    def any_at(self, names, want):
        for name in names:
            ptr = self.registry.open_ipc(name)  # leak: the first match returns with its handle open
            if self.gpu.read_version(ptr) == want:
                return True
            self.registry.close_ipc(name)
        return False
