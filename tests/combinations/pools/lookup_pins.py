# take: P.lookup_and_pin(key)
# give: P.unpin(key)
# gets: optional
# type: LocalCPUBackend
class MemoryObj:
    def __init__(self, payload):
        self.payload = payload
        self.pin_count = 0

    @property
    def is_pinned(self):
        return self.pin_count > 0


class LocalCPUBackend:
    """Chunk cache in host memory; pinned chunks survive eviction."""

    def __init__(self, max_chunks):
        self.max_chunks = max_chunks
        self.hot_cache = {}

    def submit_put(self, chunk_hash, payload):
        if chunk_hash in self.hot_cache:
            return
        if len(self.hot_cache) >= self.max_chunks and not self._evict_one():
            return
        self.hot_cache[chunk_hash] = MemoryObj(payload)

    def _evict_one(self):
        for h, obj in self.hot_cache.items():
            if not obj.is_pinned:
                del self.hot_cache[h]
                return True
        return False

    def lookup_and_pin(self, chunk_hash):
        obj = self.hot_cache.get(chunk_hash)
        if obj is not None:
            obj.pin_count += 1
        return obj

    def unpin(self, chunk_hash):
        obj = self.hot_cache[chunk_hash]
        assert obj.pin_count > 0, f"{chunk_hash} is not pinned"
        obj.pin_count -= 1
