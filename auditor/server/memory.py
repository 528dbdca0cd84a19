"""What a long-lived process knows of its last audits; the cache on disk is written for saved files only."""

from auditor.cache import Cache, Kind


class Memory(Cache):
    """Answers by name in front of a cache on disk. One answer a name is kept, as there."""

    def __init__(self, disk: Cache) -> None:
        super().__init__(None, None)
        self.remembers = True
        self.disk = disk
        self.saved = True  # whether what is audited is what lies on disk
        self._answers: dict[str, tuple[str, object]] = {}

    def has(self, name: str) -> bool:
        return name in self._answers or self.disk.has(name)

    def get(self, name: str, key: str, kind: type[Kind]) -> Kind | None:
        held = self._answers.get(name)
        if held is not None and held[0] == key:
            value: Kind = held[1]  # type: ignore[assignment]  # put under that name, of that kind
            return value
        found = self.disk.get(name, key, kind) if held is None else None
        if found is not None:
            self._answers[name] = (key, found)
        return found

    def put(self, name: str, key: str, value: object) -> None:
        self._answers[name] = (key, value)
        if self.saved:
            self.disk.put(name, key, value)


class Glimpse(Cache):
    """What the memory knows of single files; what a glance finds is not remembered as a whole audit's."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(None, None)
        self._memory = memory

    def get(self, name: str, key: str, kind: type[Kind]) -> Kind | None:
        return self._memory.get(name, key, kind) if name == "scan" else None
