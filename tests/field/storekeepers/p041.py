from dataclasses import dataclass, field


class VersionPins:
    def __init__(self):
        self.refs = {0: 0}
        self.latest = 0

    def acquire_version(self):
        self.refs[self.latest] += 1
        return self.latest

    def release_version(self, version):
        self.refs[version] -= 1
        if self.refs[version] == 0 and version != self.latest:
            del self.refs[version]

    def install(self):
        self.latest += 1
        self.refs[self.latest] = 0


@dataclass
class Iterator:
    version: int
    start: bytes
    end: bytes
    position: int = 0


@dataclass
class Session:
    name: str
    iterators: dict = field(default_factory=dict)
    snapshot: int = -1


class Database:
    def __init__(self, pins):
        self.pins = pins
        self.sessions = {}

    def connect(self, name):
        return self.sessions.setdefault(name, Session(name))

    def iterate(self, name, iid, start, end):
        session = self.connect(name)
        if iid in session.iterators:
            self.pins.release_version(session.iterators.pop(iid).version)
        version = self.pins.acquire_version()  # leak: disconnect drops open iterators with the session
        session.iterators[iid] = Iterator(version, start, end)

    def advance(self, name, iid, steps):
        it = self.sessions[name].iterators[iid]
        it.position += steps
        return it.position

    def finish(self, name, iid):
        it = self.sessions[name].iterators.pop(iid)
        self.pins.release_version(it.version)

    def snapshot(self, name):
        session = self.connect(name)
        if session.snapshot >= 0:
            self.pins.release_version(session.snapshot)
        session.snapshot = self.pins.acquire_version()  # clean: old and last one released
        return session.snapshot

    def get(self, key, lookup):
        version = self.pins.acquire_version()  # clean: released below
        value = lookup(version, key)
        self.pins.release_version(version)
        return value

    def disconnect(self, name):
        session = self.sessions.pop(name, None)
        if session is not None and session.snapshot >= 0:
            self.pins.release_version(session.snapshot)
            session.snapshot = -1
