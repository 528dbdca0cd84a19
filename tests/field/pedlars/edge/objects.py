"""Object cache of an edge node: entries are pinned while they are served."""
from typing import Dict, Iterator, List, Optional


class Entry:
    def __init__(self, key: str, body: bytes, etag: str) -> None:
        self.key = key
        self.body = body
        self.etag = etag
        self.pins = 0
        self.next_variant: Optional[str] = None


class ObjectCache:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: Dict[str, Entry] = {}

    def store(self, entry: Entry) -> None:
        if len(self._entries) >= self.limit:
            for key, old in list(self._entries.items()):
                if old.pins == 0:
                    del self._entries[key]
                    break
        self._entries[entry.key] = entry

    def fetch_pinned(self, key: str) -> Optional[Entry]:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.pins += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1


class Variants:
    """Chooses the variant of an object by encoding."""

    def __init__(self, cache: ObjectCache) -> None:
        self.cache = cache

    def choose(self, key: str, gzip: bool) -> Optional[Entry]:
        entry = self.cache.fetch_pinned(key)  # clean: near miss, returned or exchanged for the variant
        if entry is None or not gzip or entry.next_variant is None:
            return entry
        other = self.cache.fetch_pinned(entry.next_variant)  # clean: handed on where it is there
        if other is None:
            return entry
        self.cache.unpin(entry)
        return other

    def all_of(self, key: str) -> Iterator[Entry]:
        """Yields pinned entries; whoever iterates must unpin each."""
        at: Optional[str] = key
        while at is not None:
            entry = self.cache.fetch_pinned(at)  # clean: handed on by yield
            if entry is None:
                return
            at = entry.next_variant
            yield entry

    def total_size(self, key: str) -> int:
        total = 0
        for entry in self.all_of(key):  # clean: each one unpinned in the loop
            total += len(entry.body)
            self.cache.unpin(entry)
        return total

    def etags(self, key: str) -> List[str]:
        return [e.etag for e in self.all_of(key)]  # leak: the pinned entries are dropped for their tags
