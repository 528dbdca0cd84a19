class Handle:
    def __init__(self, journal, credits):
        self.journal = journal
        self.credits = credits
        self.used = 0

    def log(self, block):
        self.used += 1
        self.journal.blocks.append(block)

    def stop(self):
        self.journal.reserved -= self.credits
        self.journal.updates -= 1


class Journal:
    def __init__(self, capacity):
        self.capacity = capacity
        self.reserved = 0
        self.updates = 0
        self.blocks = []

    def start(self, credits):
        if self.reserved + credits + len(self.blocks) > self.capacity:
            self.checkpoint()
        self.reserved += credits
        self.updates += 1
        return Handle(self, credits)

    def checkpoint(self):
        if self.updates == 0:
            self.blocks.clear()


class Directory:
    def __init__(self, journal, entries):
        self.journal = journal
        self.entries = entries

    def link(self, name, inum):
        h = self.journal.start(2)  # clean: stopped in finally
        try:
            self.entries[name] = inum
            h.log(("link", name))
        finally:
            h.stop()

    def unlink(self, name):
        h = self.journal.start(3)  # leak: a missing name returns with the handle running
        if name not in self.entries:
            return False
        del self.entries[name]
        h.log(("unlink", name))
        h.stop()
        return True

    def rename(self, old, new):
        h = self.journal.start(4)  # clean: stopped on both branches
        if old in self.entries:
            self.entries[new] = self.entries.pop(old)
            h.log(("rename", old, new))
            h.stop()
            return True
        h.stop()
        return False

    def sync_marker(self):
        self.journal.start(1).log(("sync",))  # leak: the handle is dropped without stop
