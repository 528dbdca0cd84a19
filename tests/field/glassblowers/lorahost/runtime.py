from .registry import Registry


class Runtime:
    """Applies adapters to batches; a request holds its entry while it runs."""

    def __init__(self, registry: Registry, kernel):
        self.registry = registry
        self.kernel = kernel
        self.of_request = {}

    def begin(self, rid, name):
        if rid in self.of_request:
            return True
        entry = self.registry.acquire(name)  # clean: near miss, kept in of_request until end()
        if entry is None:
            return False
        self.of_request[rid] = entry
        return True

    def end(self, rid):
        entry = self.of_request.pop(rid, None)
        if entry is not None:
            self.registry.release(entry)

    def apply(self, x, names):
        held = []
        try:
            for name in names:
                entry = self.registry.acquire(name)  # clean: released in finally through held
                if entry is not None:
                    held.append(entry)
            return self.kernel.sgmv(x, [e.pages for e in held])
        finally:
            for entry in held:
                self.registry.release(entry)

    def hot(self, names):
        """Names whose adapters other requests use as well."""
        out = []
        for name in names:
            entry = self.registry.acquire(name)  # leak: continue for an adapter nobody else uses skips release
            if entry is None:
                continue
            if entry.users == 1:
                continue
            out.append(name)
            self.registry.release(entry)
        return out
