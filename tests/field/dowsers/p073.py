"""All-or-nothing acquisition of several link channels."""
import threading


class Channels:
    def __init__(self, names):
        self._names = list(names)
        self._held = set()
        self._cv = threading.Condition()

    def acquire_many(self, n, block=True):
        with self._cv:
            while len(self._names) - len(self._held) < n:
                if not block:
                    return []
                self._cv.wait()
            got = [c for c in self._names if c not in self._held][:n]
            self._held.update(got)
            return got

    def release_many(self, chans):
        with self._cv:
            self._held.difference_update(chans)
            self._cv.notify_all()


class NvlinkCopier:
    def __init__(self, channels: Channels, hw):
        self.channels = channels
        self.hw = hw

    def copy(self, src, dst, width=2):
        chans = self.channels.acquire_many(width)  # clean: finally
        try:
            parts = src.split(len(chans))
            for c, part in zip(chans, parts):
                self.hw.send(c, part, dst)
        finally:
            self.channels.release_many(chans)

    def copy_fast(self, src, dst):
        chans = self.channels.acquire_many(4, block=False)  # leak: a small source returns with four channels
        if not chans:
            return False
        if src.nbytes < 4096:
            return self.hw.inline(src, dst)
        self.hw.stripe(chans, src, dst)
        self.channels.release_many(chans)
        return True

    def gather(self, srcs, dst):
        for src in srcs:
            chans = self.channels.acquire_many(1)  # leak: break when the destination is full
            if dst.room < src.nbytes:
                break
            self.hw.send(chans[0], src, dst)
            self.channels.release_many(chans)
        return dst

    def reserve_for(self, job):
        job.chans = self.channels.acquire_many(job.width)  # clean: end_job() releases them
        return len(job.chans)

    def end_job(self, job):
        self.channels.release_many(job.chans)
        job.chans = []
