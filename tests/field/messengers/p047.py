"""Shared counters of a match server, obtained with map and comprehensions."""


class CounterBank:
    def __init__(self, size):
        self._unused = list(range(size))
        self.value = [0] * size

    def reserve(self, start=0):
        cell = self._unused.pop()
        self.value[cell] = start
        return cell

    def unreserve(self, cell):
        self._unused.append(cell)


class Match:
    def __init__(self, bank, players):
        self.bank = bank
        self.players = sorted(set(players))
        self.score = {player: bank.reserve() for player in self.players}  # clean: kept until over
        self.rounds = []

    def hit(self, player, points):
        self.bank.value[self.score[player]] += points

    def over(self):
        for cell in self.score.values():
            self.bank.unreserve(cell)
        self.score = {}

    def tally(self, votes):
        cells = list(map(self.bank.reserve, votes))  # clean: all unreserved
        total = sum(self.bank.value[cell] for cell in cells)
        for cell in cells:
            self.bank.unreserve(cell)
        return total

    def best_of(self, votes):
        cells = [self.bank.reserve(vote) for vote in votes]  # leak: only the best one is unreserved
        best = max(cells, key=lambda cell: self.bank.value[cell])
        points = self.bank.value[best]
        self.bank.unreserve(best)
        self.rounds.append(points)
        return points

    def rank(self, votes):
        cells = sorted(map(self.bank.reserve, votes), key=self.bank.value.__getitem__)  # clean: drained
        order = []
        while cells:
            cell = cells.pop()
            order.append(self.bank.value[cell])
            self.bank.unreserve(cell)
        return order

    def trial(self, votes):
        first, *rest = map(self.bank.reserve, votes)  # leak: the rest is left
        lead = self.bank.value[first] - max((self.bank.value[cell] for cell in rest), default=0)
        self.bank.unreserve(first)
        return lead
