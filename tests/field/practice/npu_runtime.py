"""Thin python layer above an accelerator runtime (vendor code, ported from C)."""
import ctypes
import threading

import torch

RT_SUCCESS = 0
RT_ERR_NOMEM = 2
RT_ERR_STATE = 5


class RtContext:
    pass


class RtRuntime:
    """Software model of the runtime; every handle is an int."""

    def __init__(self, maxHandles=256):
        self._lock = threading.Lock()
        self._bitmap = [False] * maxHandles
        self._live = {}

    def createHandle(self, kind, size=0):
        with self._lock:
            for h, used in enumerate(self._bitmap):
                if not used:
                    self._bitmap[h] = True
                    self._live[h] = (kind, size)
                    return h
        return -RT_ERR_NOMEM

    def destroyHandle(self, h):
        with self._lock:
            if h not in self._live:
                return RT_ERR_STATE
            del self._live[h]
            self._bitmap[h] = False
        return RT_SUCCESS


class NpuBuffer:
    def __init__(self, rt, nbytes):
        self.rt = rt
        self.nbytes = nbytes
        self.h = rt.createHandle("mem", nbytes)  # clean: destroy() gives the handle back
        if self.h < 0:
            raise MemoryError(nbytes)

    def destroy(self):
        if self.h >= 0:
            self.rt.destroyHandle(self.h)
            self.h = -1


class NpuModel:
    def __init__(self, rt, blob, profile=False):
        self.rt = rt
        self.blob = blob
        self.profile = profile
        self.hModel = rt.createHandle("model", len(blob))  # clean: unload() destroys it
        self.hProf = rt.createHandle("prof") if profile else -1  # clean: near miss, destroyed under the same flag
        self.hQueue = -1

    def openQueue(self):
        if self.hQueue >= 0:
            return RT_ERR_STATE
        self.hQueue = self.rt.createHandle("queue")  # leak: unload() leaves by the first return when the model handle is bad
        return RT_SUCCESS if self.hQueue >= 0 else RT_ERR_NOMEM

    def unload(self):
        if self.profile:
            self.rt.destroyHandle(self.hProf)
        rc = self.rt.destroyHandle(self.hModel)
        if rc != RT_SUCCESS:
            return rc
        if self.hQueue >= 0:
            return self.rt.destroyHandle(self.hQueue)
        return RT_SUCCESS

    def execute(self, x):
        ev = self.rt.createHandle("event")  # leak: the unsupported dtype returns an error code only
        if ev < 0:
            return -ev, None
        if x.dtype not in (torch.float16, torch.int8):
            return RT_ERR_STATE, None
        y = x.clone()
        rc = self.rt.destroyHandle(ev)
        return rc, y

    def executeBatch(self, xs):
        evs = []
        rc = RT_SUCCESS
        for x in xs:
            ev = self.rt.createHandle("event")  # clean: near miss, goto-style cleanup below destroys what was created
            if ev < 0:
                rc = RT_ERR_NOMEM
                break
            evs.append(ev)
            if x.numel() == 0:
                rc = RT_ERR_STATE
                break
        for ev in evs:
            self.rt.destroyHandle(ev)
        return rc

    def executePair(self, a, b):
        ha = self.rt.createHandle("mem", a.numel())  # leak: failing to create the second handle skips its destruction
        if ha < 0:
            return RT_ERR_NOMEM
        hb = self.rt.createHandle("mem", b.numel())  # clean: destroyed before the return
        if hb < 0:
            return RT_ERR_NOMEM
        self.rt.destroyHandle(hb)
        return self.rt.destroyHandle(ha)

    def executeChecked(self, a):
        h = self.rt.createHandle("mem", a.numel())  # clean: near miss, a negative handle is no handle
        if h < 0:
            raise MemoryError("npu out of handles")
        try:
            if torch.isnan(a).any():
                raise ValueError("nan input")
            return a.sum().item()
        finally:
            self.rt.destroyHandle(h)


class BufferTable:
    def __init__(self, rt):
        self.rt = rt
        self.bufs = {}

    def create(self, name, nbytes):
        if name in self.bufs:
            self.bufs[name].destroy()
        self.bufs[name] = NpuBuffer(self.rt, nbytes)  # clean: near miss, an older buffer of the name was destroyed first
        return self.bufs[name]

    def createMany(self, sizes):
        for name, nbytes in sizes.items():
            self.bufs.setdefault(name, NpuBuffer(self.rt, nbytes))  # leak: for a known name the new buffer is thrown away

    def destroyAll(self):
        for b in self.bufs.values():
            b.destroy()
        self.bufs.clear()

    def stage(self, x):
        buf = NpuBuffer(self.rt, x.numel() * x.element_size())  # clean: destroyed on the only path
        ptr = ctypes.c_void_p(x.data_ptr())
        ok = ptr.value is not None
        buf.destroy()
        return ok

    def fits(self, x, limit):
        buf = NpuBuffer(self.rt, x.numel() * x.element_size())  # leak: small inputs return True without destroy
        if buf.nbytes <= limit:
            return True
        buf.destroy()
        return False


def loadModel(rt, path):
    f = open(path, "rb")  # clean: closed after the read
    blob = f.read()
    f.close()
    return NpuModel(rt, blob)  # clean: handed to the caller


def benchModel(rt, path, xs):
    m = loadModel(rt, path)  # leak: an error code returns without unload
    for x in xs:
        rc, _ = m.execute(x)
        if rc != RT_SUCCESS:
            return rc
    return m.unload()


def smokeTest(rt, path):
    m = loadModel(rt, path)  # clean: near miss, unload is called in either branch
    if not m.blob:
        m.unload()
        return False
    return m.unload() == RT_SUCCESS
