import logging

logger = logging.getLogger(__name__)


class TagSpace:
    """Command tags of one submission queue."""

    def __init__(self, depth):
        self._tags = set(range(depth))

    def get_tag(self):
        return self._tags.pop()

    def put_tag(self, tag):
        self._tags.add(tag)


class Driver:
    def __init__(self, tags, doorbell):
        self.tags = tags
        self.doorbell = doorbell
        self.inflight = {}
        self.aborting = {}
        self.admin = None
        self.errors = 0

    def submit(self, cmd):
        tag = self.tags.get_tag()  # leak: timed out commands move to aborting, which nobody empties
        self.inflight[tag] = (cmd, 0)
        self.doorbell(tag, cmd)
        return tag

    def complete(self, tag, status):
        entry = self.inflight.pop(tag, None)
        if entry is None:
            logger.warning("stray completion %s", tag)
            return None
        if status:
            self.errors += 1
        self.tags.put_tag(tag)
        return entry[0]

    def tick(self):
        for tag, (cmd, age) in list(self.inflight.items()):
            if age >= 3:
                self.aborting[tag] = self.inflight.pop(tag)
                self.doorbell(tag, "abort")
            else:
                self.inflight[tag] = (cmd, age + 1)

    def identify(self):
        if self.admin is None:
            self.admin = self.tags.get_tag()  # clean: remove puts it back
        self.doorbell(self.admin, "identify")

    def format(self, blocks):
        tag = self.tags.get_tag()  # clean: put back after the doorbell loop
        for lba in range(0, blocks, 256):
            self.doorbell(tag, "zero %d" % lba)
        self.tags.put_tag(tag)

    def remove(self):
        for tag in list(self.inflight):
            self.complete(tag, -1)
        if self.admin is not None:
            self.tags.put_tag(self.admin)
            self.admin = None
        return len(self.aborting)


class Trim:
    def __init__(self, tags):
        self.tags = tags
        self.tag = None
        self.ranges = []

    def add(self, start, length):
        if self.tag is None:
            self.tag = self.tags.get_tag()  # leak: discard without ranges sets it to None
        if length:
            self.ranges.append((start, length))

    def discard(self, doorbell):
        if self.ranges:
            doorbell(self.tag, list(self.ranges))
            self.ranges.clear()
            self.tags.put_tag(self.tag)
        self.tag = None
