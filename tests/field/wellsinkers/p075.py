"""Command tags of a disk queue: a bitmap in 64-bit words."""
import numpy as np


class TagSet:
    def __init__(self, depth):
        self.words = np.zeros((depth + 63) // 64, dtype=np.uint64)
        self.depth, self.hint = depth, 0

    def _test(self, tag):
        return bool((self.words[tag >> 6] >> np.uint64(tag & 63)) & np.uint64(1))

    def get_tag(self):
        for k in range(self.depth):
            tag = (self.hint + k) % self.depth
            if not self._test(tag):
                self.words[tag >> 6] |= np.uint64(1) << np.uint64(tag & 63)
                self.hint = tag + 1
                return tag
        return None

    def put_tag(self, tag):
        self.words[tag >> 6] &= ~(np.uint64(1) << np.uint64(tag & 63))


class NvmeQueue:
    def __init__(self, tags, doorbell):
        self.tags = tags
        self.doorbell = doorbell
        self.requests = {}

    def submit(self, request):
        tag = self.tags.get_tag()  # clean: stored with the request, put by complete
        if tag is None:
            return False
        self.requests[tag] = request
        self.doorbell.ring(tag)
        return True

    def complete(self, tag):
        request = self.requests.pop(tag)
        self.tags.put_tag(tag)
        return request

    def submit_sync(self, request, timeout):
        tag = self.tags.get_tag()  # leak: a timed-out command keeps its tag
        if tag is None:
            return None
        self.doorbell.ring(tag)
        if not self.doorbell.wait(tag, timeout):
            return None
        self.tags.put_tag(tag)
        return request

    def flush(self):
        tag = self.tags.get_tag()  # clean: put in finally
        if tag is None:
            return False
        try:
            return self.doorbell.flush(tag)
        finally:
            self.tags.put_tag(tag)


def abort_all(queue, victims):
    for victim in victims:
        tag = queue.tags.get_tag()  # leak: aborts take a tag each and put none
        if tag is None:
            return
        queue.doorbell.abort(tag, victim)
