# take: P.try_admit(n, key)
# give: P.evict(key)
# gets: answer
# type: EncoderCacheBudget
class EncoderCacheBudget:
    """Accounts encoder embeddings (in tokens) held per multimodal item."""

    def __init__(self, cache_size):
        self.cache_size = cache_size
        self._held = {}

    @property
    def num_free_slots(self):
        return self.cache_size - sum(self._held.values())

    def has(self, mm_hash):
        return mm_hash in self._held

    def try_admit(self, num_tokens, mm_hash):
        if mm_hash in self._held or num_tokens > self.num_free_slots:
            return False
        self._held[mm_hash] = num_tokens
        return True

    def evict(self, mm_hash):
        if self._held.pop(mm_hash, None) is None:
            raise KeyError(f"{mm_hash} has no encoder cache entry")
