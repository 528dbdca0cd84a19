# take: P.numbers(n)
# give: P.forget(*X)
# gets: value
# type: SequenceNumbers
import itertools as it


class SequenceNumbers:
    """Small integer ids for sequences; the id space grows without limit but is reused eagerly."""

    def __init__(self):
        self._ever = it.count()
        self._reusable = []

    def numbers(self, howmany):
        reuse = self._reusable[:howmany]
        del self._reusable[:howmany]
        return reuse + list(it.islice(self._ever, howmany - len(reuse)))

    def forget(self, *ids):
        self._reusable.extend(ids)
        self._reusable.sort()
