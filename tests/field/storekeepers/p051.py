class StreamIds:
    def __init__(self, limit):
        self.limit = limit
        self.open = set()
        self.last = -1

    def begin_stream(self):
        if len(self.open) >= self.limit:
            return None
        self.last += 2
        self.open.add(self.last)
        return self.last

    def end_stream(self, sid):
        self.open.discard(sid)


class Http2Session:
    """Requests by stream id, and the streams of every tab."""

    def __init__(self, ids, transport):
        self.ids = ids
        self.transport = transport
        self.requests = {}
        self.tabs = {}
        self.push = []
        self.control = ids.begin_stream()  # clean: goaway ends it

    def request(self, tab, path):
        sid = self.ids.begin_stream()  # leak: reset by the peer removes the request and its stream stays open
        if sid is None:
            return None
        self.requests[sid] = [tab, path, b""]
        self.tabs.setdefault(tab, []).append(sid)
        self.transport("HEADERS", sid, path)
        return sid

    def on_data(self, sid, data, end):
        entry = self.requests.get(sid)
        if entry is None:
            return None
        entry[2] += data
        return self._finish(sid) if end else None

    def _finish(self, sid):
        tab, _, body = self.requests.pop(sid)
        self.tabs[tab].remove(sid)
        self.ids.end_stream(sid)
        return body

    def on_reset(self, sid):
        entry = self.requests.pop(sid, None)
        if entry is not None and sid in self.tabs[entry[0]]:
            self.tabs[entry[0]].remove(sid)
        return entry

    def close_tab(self, tab):
        for sid in self.tabs.get(tab, [])[:]:
            self.transport("RST", sid, "")
            self._finish(sid)
        self.tabs.pop(tab, None)

    def on_push(self, path):
        sid = self.ids.begin_stream()  # leak: goaway replaces the list of pushes
        if sid is not None:
            self.push.append((sid, path))
        return sid

    def ping(self):
        sid = self.ids.begin_stream()  # clean: ended below
        if sid is None:
            return False
        self.transport("PING", sid, "")
        self.ids.end_stream(sid)
        return True

    def goaway(self):
        for tab in list(self.tabs):
            self.close_tab(tab)
        pushed, self.push = len(self.push), []
        if self.control is not None:
            self.ids.end_stream(self.control)
            self.control = None
        return pushed
