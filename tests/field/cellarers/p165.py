from enum import IntEnum


CbState = IntEnum("CbState", ["INITIAL", "RECORDING", "PENDING"])


class CommandBuffers:
    def __init__(self, device, n):
        self.device = device
        self.states = [CbState.INITIAL] * n
        self.commands = [[] for _ in range(n)]
        self.fences = {}

    def begin(self):
        self._collect()
        for i, s in enumerate(self.states):
            if s == CbState.INITIAL:
                self.states[i] = CbState.RECORDING
                return i
        raise RuntimeError("command buffers exhausted")

    def record(self, i, *cmd):
        self.commands[i].append(cmd)

    def submit(self, i):
        self.states[i] = CbState.PENDING
        self.fences[i] = self.device.submit(self.commands[i])

    def reset(self, i):
        self.commands[i].clear()
        self.states[i] = CbState.INITIAL

    def _collect(self):
        for i in [i for i, f in self.fences.items() if f.signaled()]:
            del self.fences[i]
            self.reset(i)


def draw_frame(cbs, scene):
    cb = cbs.begin()  # clean: submitted, the fence returns it
    cbs.record(cb, "draw", scene)
    cbs.submit(cb)


def draw_shadow(cbs, scene, light):
    cb = cbs.begin()  # leak: a light without casters leaves the buffer recording
    casters = [m for m in scene if light.reaches(m)]
    if not casters:
        return 0
    cbs.record(cb, "draw_depth", casters)
    cbs.submit(cb)
    return len(casters)


def copy_texture(cbs, src, dst):
    cb = cbs.begin()  # clean: reset or submitted
    if src.size != dst.size:
        cbs.reset(cb)
        return False
    cbs.record(cb, "copy", src, dst)
    cbs.submit(cb)
    return True


def measure(cbs, scene):
    cb = cbs.begin()  # leak: recorded for counting, neither submitted nor reset
    cbs.record(cb, "draw", scene)
    return len(cbs.commands[cb])
