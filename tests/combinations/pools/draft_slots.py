# take: P.grant(n)
# give: P.ungrant(*X)
# gets: optional
# type: DraftTokenSlots
class DraftTokenSlots:
    """Lookahead slots for speculative tokens, all or nothing."""

    def __init__(self, total):
        self._bottom = 0
        self._total = total
        self._back = []

    @property
    def spare(self):
        return self._total - self._bottom + len(self._back)

    def grant(self, k):
        if k > self.spare:
            return None
        got = []
        while self._back and len(got) < k:
            got.append(self._back.pop())
        fresh = k - len(got)
        got.extend(range(self._bottom, self._bottom + fresh))
        self._bottom += fresh
        return got

    def ungrant(self, *slots):
        clash = set(slots) & set(self._back)
        if clash:
            raise ValueError(f"draft slots freed twice: {sorted(clash)}")
        self._back.extend(slots)
