"""Pinned staging slots; the lease is its own context manager."""
import threading


class StagingLease:
    def __init__(self, owner, index):
        self.owner = owner
        self.index = index

    @property
    def view(self):
        return self.owner.slots[self.index]

    def close(self):
        self.owner._ids.add(self.index)
        self.owner._sem.release()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Staging:
    def __init__(self, memory, slot_bytes):
        self.slots = [memory[i:i + slot_bytes] for i in range(0, len(memory), slot_bytes)]
        self._sem = threading.BoundedSemaphore(len(self.slots))
        self._ids = set(range(len(self.slots)))

    def stage(self):
        self._sem.acquire()
        return StagingLease(self, self._ids.pop())


class HostToDevice:
    def __init__(self, staging: Staging, gpu):
        self.staging = staging
        self.gpu = gpu

    def upload(self, chunk, dst):
        with self.staging.stage() as lease:  # clean: with
            lease.view[:len(chunk)] = chunk
            self.gpu.copy(dst, lease.view)

    def upload_stream(self, chunks, dst):
        for chunk in chunks:
            lease = self.staging.stage()  # leak: break at the end marker keeps the slot
            if not chunk:
                break
            lease.view[:len(chunk)] = chunk
            self.gpu.append(dst, lease.view)
            lease.close()

    def readback(self, src, n):
        lease = self.staging.stage()  # clean: closed in finally
        try:
            self.gpu.copy(lease.view, src)
            return bytes(lease.view[:n])
        finally:
            lease.close()

    def fill(self, dst, value):
        lease = self.staging.stage()  # leak: zero goes to memset and returns with the slot
        if value == 0:
            return self.gpu.memset(dst)
        lease.view[:] = bytes([value]) * len(lease.view)
        self.gpu.copy(dst, lease.view)
        lease.close()
