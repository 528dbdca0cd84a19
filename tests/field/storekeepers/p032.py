import time
import uuid


class LicenseServer:
    def __init__(self, keys):
        self._pool = list(keys)
        self._log = []

    def check_out(self, feature):
        key = self._pool.pop()
        self._log.append(("out", feature, key))
        return key

    def check_in(self, key):
        self._log.append(("in", None, key))
        self._pool.append(key)


class Workbench:
    """A list of (tool, key, opened-at) tuples."""

    def __init__(self, server):
        self.server = server
        self.tools = []
        self.batch = {}
        self.session = uuid.uuid4().hex

    def open_tool(self, tool):
        key = self.server.check_out(tool)  # leak: close_idle filters old tools out without check_in
        self.tools.append((tool, key, time.time()))
        return len(self.tools)

    def close_idle(self, seconds):
        now = time.time()
        before = len(self.tools)
        self.tools = [t for t in self.tools if now - t[2] < seconds]
        return before - len(self.tools)

    def close_tool(self, tool):
        for entry in self.tools[:]:
            if entry[0] == tool:
                self.tools.remove(entry)
                self.server.check_in(entry[1])

    def queue_batch(self, name, features):
        if name in self.batch:
            return False
        self.batch[name] = [self.server.check_out(f) for f in features]  # leak: run_batch without steps
        return True

    def run_batch(self, name, steps):
        keys = self.batch.pop(name, [])
        if not steps:
            return []
        results = [step(self.session, keys) for step in steps]
        for key in keys:
            self.server.check_in(key)
        return results

    def evaluate(self, feature, func):
        key = self.server.check_out(feature)  # clean: checked in below
        started = time.time()
        value = func(key)
        self.server.check_in(key)
        return value, time.time() - started

    def quit(self):
        for tool in {t[0] for t in self.tools}:
            self.close_tool(tool)
        for name in list(self.batch):
            for key in self.batch.pop(name):
                self.server.check_in(key)


def export(server, path, text):
    key = server.check_out("export")  # clean: checked in below
    with open(path, "w") as fh:
        fh.write("%s\n%s" % (key, text))
    server.check_in(key)
