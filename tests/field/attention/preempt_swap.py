'''Preemption by swapping. Victims give device frames up and get host frames.'''
import heapq
import logging
from typing import Dict, List, Optional, Tuple

LOG = logging.getLogger('swap')


class FrameTable(object):
    '''Reference counted frames.'''

    def __init__(self, name, n):
        self.name = name
        self.refs = [0] * n
        self.idle = list(range(n))

    def acquire_frame(self):
        if not self.idle:
            return -1
        f = heapq.heappop(self.idle)
        self.refs[f] = 1
        return f

    def inc_ref(self, f):
        self.refs[f] += 1

    def dec_ref(self, f):
        self.refs[f] -= 1
        if self.refs[f] == 0:
            heapq.heappush(self.idle, f)

    def release_frames(self, frames):
        for f in frames:
            self.dec_ref(f)

    def acquire_frames(self, n):
        if n > len(self.idle):
            return None
        return [self.acquire_frame() for _ in range(n)]  # clean: near miss, the count was checked before, all go to the caller


class Task(object):
    def __init__(self, tid, prio):
        self.tid = tid
        self.prio = prio
        self.frames = []
        self.host = []

    def __lt__(self, other):
        return self.prio < other.prio


class Swapper(object):
    def __init__(self, dev, host):
        self.dev = dev
        self.host = host
        self.active = {}
        self.swapped = {}

    def admit(self, task, n):
        if task.tid in self.active or task.tid in self.swapped:
            return False
        got = self.dev.acquire_frames(n)  # clean: all or None, held by the task until retire
        if got is None:
            return False
        task.frames = got
        self.active[task.tid] = task
        return True

    def swap_out(self, tid):
        task = self.active[tid]
        host = self.host.acquire_frames(len(task.frames))  # clean: held by the swapped task, swap_in and kill release it
        if host is None:
            return False
        self.dev.release_frames(task.frames)
        task.frames = []
        task.host = host
        del self.active[tid]
        self.swapped[tid] = task
        return True

    def swap_in(self, tid):
        task = self.swapped[tid]
        frames = self.dev.acquire_frames(len(task.host))  # clean: held by the task
        if frames is None:
            return False
        self.host.release_frames(task.host)
        task.host = []
        task.frames = frames
        self.active[tid] = self.swapped.pop(tid)
        return True

    def make_room(self, n):
        victims = sorted(self.active.values())
        host = []
        for v in victims:
            if len(self.dev.idle) >= n:
                break
            for _ in v.frames:
                f = self.host.acquire_frame()  # leak: without a host frame False is returned and the gathered ones are lost
                if f < 0:
                    return False
                host.append(f)
            self.dev.release_frames(v.frames)
            v.frames, v.host, host = [], host, []
            self.swapped[v.tid] = self.active.pop(v.tid)
        return True

    def make_room_checked(self, n):
        for v in sorted(self.active.values()):
            if len(self.dev.idle) >= n:
                break
            host = []
            for _ in v.frames:
                f = self.host.acquire_frame()  # clean: near miss, on shortage the gathered ones are released
                if f < 0:
                    self.host.release_frames(host)
                    return False
                host.append(f)
            self.dev.release_frames(v.frames)
            v.frames, v.host = [], host
            self.swapped[v.tid] = self.active.pop(v.tid)
        return True

    def retire(self, tid):
        task = self.active.pop(tid)
        self.dev.release_frames(task.frames)
        task.frames = []

    def kill(self, tid):
        if tid in self.active:
            self.retire(tid)
            return
        task = self.swapped.pop(tid, None)
        if task is not None:
            self.host.release_frames(task.host)
            task.host = []

    def share(self, src, dst):
        a, b = self.active[src], self.active[dst]
        for f in a.frames:
            self.dev.inc_ref(f)  # clean: retire of the second task drops the count
            b.frames.append(f)

    def share_prefix(self, src, dst, n):
        a, b = self.active[src], self.active[dst]
        for i, f in enumerate(a.frames):
            self.dev.inc_ref(f)  # leak: the frame at the limit is counted and then not added
            if i >= n:
                break
            b.frames.append(f)

    def audit(self, tid):
        total = 0
        task = self.active[tid]
        for f in task.frames:
            self.dev.inc_ref(f)  # clean: near miss, the odd ones drop before they continue
            if f % 2:
                self.dev.dec_ref(f)
                continue
            total += self.dev.refs[f] - 1
            self.dev.dec_ref(f)
        return total

    def audit_busy(self, tid):
        busy = []
        for f in self.active[tid].frames:
            self.dev.inc_ref(f)  # leak: frames used by one task alone continue with the extra count
            if self.dev.refs[f] == 2:
                continue
            busy.append(f)
            self.dev.dec_ref(f)
        return busy

    def trial(self, sizes):
        # type: (List[int]) -> Optional[int]
        best = None
        for n in sizes:
            got = self.dev.acquire_frames(n)  # clean: released in the same round
            if got is None:
                continue
            best = n if best is None else max(best, n)
            self.dev.release_frames(got)
        return best

    def trial_two(self, n, m):
        a = self.dev.acquire_frames(n)  # clean: released on each way where it is not None
        if a is None:
            return (0, 0)
        b = self.host.acquire_frames(m)  # leak: released to nobody when the host has more idle than the device
        if b is None:
            self.dev.release_frames(a)
            return (n, 0)
        self.dev.release_frames(a)
        if len(self.host.idle) > len(self.dev.idle):
            return (n, m)
        self.host.release_frames(b)
        return (n, m)
