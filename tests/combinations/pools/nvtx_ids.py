# take: P.issue()
# give: P.revoke(X)
# gets: value
# type: RangeIds
class RangeIds:
    """Process-wide ids for profiler ranges; small ints get reused."""

    _returned = set()
    _high = 0

    @classmethod
    def issue(cls):
        if cls._returned:
            return cls._returned.pop()
        RangeIds._high += 1
        return RangeIds._high

    @classmethod
    def revoke(cls, rid):
        if rid in cls._returned or not 0 < rid <= cls._high:
            raise ValueError(f"range id {rid} is not live")
        cls._returned.add(rid)
