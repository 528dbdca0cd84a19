# take: P.join(key)
# give: P.part(key)
# gets: value
# type: CommRegistry
import threading


class CommRegistry:
    """Process groups shared by name. The last one to part tears the communicator down."""

    def __init__(self, create, destroy):
        self._create, self._destroy = create, destroy
        self._groups = {}
        self._uses = {}
        self._lock = threading.Lock()

    def join(self, name):
        with self._lock:
            if name not in self._groups:
                self._groups[name] = self._create(name)
                self._uses[name] = 0
            self._uses[name] += 1
            return self._groups[name]

    def part(self, name):
        with self._lock:
            self._uses[name] -= 1
            if self._uses[name] > 0:
                return
            del self._uses[name]
            group = self._groups.pop(name)
        self._destroy(group)

    def __len__(self):
        return len(self._groups)
