# take: P.fetch_matcher(key)
# give: P.stow_matcher(X)
# gets: value
# type: GrammarDesk
class RecyclingMixin:
    """Keeps stopped objects by kind. Subclasses say how to _build and _rewind them."""

    def _bin(self, kind):
        try:
            bins = self.__dict__["_bins"]
        except KeyError:
            bins = self.__dict__["_bins"] = {}
        return bins.setdefault(kind, [])

    def _get_one(self, kind):
        b = self._bin(kind)
        return b.pop() if b else self._build(kind)

    def _keep_one(self, kind, obj):
        self._rewind(obj)
        self._bin(kind).append(obj)


class Matcher:
    def __init__(self, grammar):
        self.grammar = grammar
        self.accepted = []


class GrammarDesk(RecyclingMixin):
    def _build(self, kind):
        return Matcher(kind)

    def _rewind(self, m):
        m.accepted.clear()

    def fetch_matcher(self, grammar):
        return self._get_one(grammar)

    def stow_matcher(self, matcher):
        self._keep_one(matcher.grammar, matcher)
