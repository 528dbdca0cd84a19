"""Engine which admits, preempts and ends sessions."""
from .session import Session


class Engine:
    def __init__(self, store, swap):
        self.store, self.swap = store, swap
        self.sessions = {}
        self.system_pages = {}

    def open(self, sid, tokens):
        if sid in self.sessions:
            return None
        s = Session(sid, self.store, self.swap)
        if not s.extend(tokens):  # clean: near miss, a session that has pages is put in the table and ended by close
            return None
        self.sessions[sid] = s
        return s

    def open_pair(self, a, b, tokens):
        first = Session(a, self.store, self.swap)
        second = Session(b, self.store, self.swap)
        if not first.extend(tokens):  # leak: when the second cannot extend, the first is dropped without end
            return False
        if not second.extend(tokens):  # clean: near miss, a failed extend holds nothing and otherwise the table keeps the session
            return False
        self.close(a)
        self.close(b)
        self.sessions[a], self.sessions[b] = first, second
        return True

    def close(self, sid):
        s = self.sessions.pop(sid, None)
        if s is not None:
            s.end()

    def measure(self, tokens):
        """Pages which a session of this length would take."""
        s = Session("probe", self.store, self.swap)
        if not s.extend(tokens):  # leak: the probe session is dropped without end
            return None
        return len(s.pages)

    def system_prompt(self, name, values):
        page = self.store.alloc()  # clean: near miss, known names free the fresh page again, others stay until drop_prompt
        if page is None:
            return None
        if name in self.system_pages:
            self.store.free(page)
            return self.system_pages[name]
        self.store.data[page, : len(values)].copy_(values)
        self.system_pages[name] = page
        return page

    def drop_prompt(self, name):
        page = self.system_pages.pop(name, None)
        if page is not None:
            self.store.free(page)

    def compact(self):
        """Move the pages of all sessions to lower numbers where that helps."""
        for s in self.sessions.values():
            for i, old in enumerate(s.pages):
                new = self.store.alloc()  # leak: a higher number continues without being freed
                if new is None:
                    return
                if new > old:
                    continue
                self.store.data[new].copy_(self.store.data[old])
                s.pages[i] = new
                self.store.free(old)

    def scratch_sum(self, values):
        page = self.store.alloc()  # leak: a None test guards the use but no free follows
        if page is None:
            return float(values.sum())
        self.store.data[page, : len(values)].copy_(values)
        return float(self.store.data[page, : len(values)].sum())
