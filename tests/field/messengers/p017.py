"""Command tags of a block device, ended by completion callbacks."""


class TagSet:
    def __init__(self, depth):
        self._tags = list(range(depth))

    def get_tag(self):
        return self._tags.pop() if self._tags else None

    def put_tag(self, tag):
        self._tags.append(tag)


class BlockQueue:
    def __init__(self, tags, hw):
        self.tags = tags
        self.hw = hw
        self.errors = 0
        self.latest = None

    def _done(self, tag, status):
        if status:
            self.errors += 1
        self.tags.put_tag(tag)

    def _note(self, tag, status):
        self.latest = (tag, status)

    def read(self, lba, count):
        tag = self.tags.get_tag()  # clean: the completion puts it
        if tag is None:
            return False
        self.hw.issue("read", tag, lba, count, on_done=self._done)
        return True

    def write(self, lba, data):
        tag = self.tags.get_tag()  # clean: put at once for an empty write, else by the completion
        if tag is None:
            return False
        if not data:
            self.tags.put_tag(tag)
            return True
        self.hw.issue("write", tag, lba, data, on_done=lambda t, status: self._done(t, status))
        return True

    def trim(self, lba, count):
        tag = self.tags.get_tag()  # leak: the completion only notes the status
        if tag is None:
            return False
        self.hw.issue("trim", tag, lba, count, on_done=self._note)
        return True

    def flush(self, wait):
        tag = self.tags.get_tag()  # clean: put after the poll or by the completion
        if tag is None:
            return None
        if wait:
            status = self.hw.poll("flush")
            self.tags.put_tag(tag)
            return status
        self.hw.issue("flush", tag, 0, 0, on_done=self._done)
        return 0

    def abort(self, victim):
        tag = self.tags.get_tag()  # leak: a victim out of range returns early
        if tag is None:
            return False
        if victim < 0 or victim == tag:
            return False
        self.hw.issue("abort", tag, victim, 0, on_done=self._done)
        return True
