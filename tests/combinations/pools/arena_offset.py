# take: P.cut(8)
# give: P.uncut(X)
# gets: optional
class Span:
    def __init__(self, start, length):
        self.start = start
        self.length = length


class Pool:
    def __init__(self, size):
        self.holes = [(0, size)]

    def cut(self, n):
        for i, (start, length) in enumerate(self.holes):
            if length >= n:
                self.holes[i] = (start + n, length - n)
                return Span(start, n)
        return None

    def uncut(self, span):
        self.holes.append((span.start, span.length))
