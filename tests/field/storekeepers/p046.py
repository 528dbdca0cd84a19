import os


class LogHandle:
    def __init__(self, owner, path):
        self.owner = owner
        self.path = path
        self.fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def close(self):
        os.close(self.fd)
        self.owner.count -= 1


class HandleFactory:
    def __init__(self, limit):
        self.limit = limit
        self.count = 0

    def open_log(self, path):
        self.count += 1
        return LogHandle(self, path)


class RotatingLog:
    def __init__(self, factory, base, limit):
        self.factory = factory
        self.base = base
        self.limit = limit
        self.generation = 0
        self.written = 0
        self.handle = factory.open_log(base)  # leak: rotate opens the next one over it

    def write(self, line):
        data = line.encode() + b"\n"
        self.written += os.write(self.handle.fd, data)
        if self.written > self.limit:
            self.rotate()

    def rotate(self):
        self.generation += 1
        self.written = 0
        path = "%s.%d" % (self.base, self.generation)
        self.handle = self.factory.open_log(path)  # leak: the next rotate opens over this one

    def close(self):
        self.handle.close()


class SplitLog:
    """One handle per level and one for the audit trail."""

    def __init__(self, factory, base):
        self.factory = factory
        self.base = base
        self.levels = {}
        self.audit = factory.open_log(base + ".audit")  # clean: close closes it

    def write(self, level, line):
        handle = self.levels.get(level)
        if handle is None:
            handle = self.factory.open_log("%s.%s" % (self.base, level))  # clean: reopen and close close it
            self.levels[level] = handle
        os.write(handle.fd, line.encode())
        if level == "error":
            os.write(self.audit.fd, line.encode())

    def reopen(self, level):
        old = self.levels.get(level)
        handle = self.factory.open_log("%s.%s" % (self.base, level))  # clean: old closed, new kept for close
        self.levels[level] = handle
        if old is not None:
            old.close()

    def close(self):
        for handle in self.levels.values():
            handle.close()
        self.levels = {}
        self.audit.close()


def touch(factory, path):
    handle = factory.open_log(path)  # clean: closed below
    os.write(handle.fd, b"")
    handle.close()
