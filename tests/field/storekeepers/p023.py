from dataclasses import dataclass
import itertools


@dataclass
class Seat:
    table: int
    chips: int = 0


class SeatPool:
    def __init__(self, tables, per_table):
        self.open = [Seat(t) for t in range(tables) for _ in range(per_table)]

    def sit(self):
        return self.open.pop()

    def stand(self, seat):
        seat.chips = 0
        self.open.append(seat)


class Lobby:
    def __init__(self, pool):
        self.pool = pool
        self.serial = itertools.count(1)
        self.by_ticket = {}
        self.by_player = {}
        self.observers = {}

    def join(self, player, chips):
        seat = self.pool.sit()  # leak: kick removes both entries and the seat never stands
        seat.chips = chips
        ticket = next(self.serial)
        self.by_ticket[ticket] = (player, seat)
        self.by_player.setdefault(player, set()).add(ticket)
        return ticket

    def leave(self, ticket):
        player, seat = self.by_ticket.pop(ticket)
        tickets = self.by_player[player]
        tickets.discard(ticket)
        if not tickets:
            del self.by_player[player]
        chips = seat.chips
        self.pool.stand(seat)
        return chips

    def kick(self, player):
        lost = 0
        for ticket in self.by_player.pop(player, ()):
            _, seat = self.by_ticket.pop(ticket)
            lost += seat.chips
        return lost

    def observe(self, player):
        if player not in self.observers:
            self.observers[player] = self.pool.sit()  # clean: unobserve and close stand it
        return self.observers[player].table

    def unobserve(self, player):
        seat = self.observers.pop(player, None)
        if seat is not None:
            self.pool.stand(seat)

    def close(self):
        for ticket in list(self.by_ticket):
            self.leave(ticket)
        for player in list(self.observers):
            self.unobserve(player)


class Tournament:
    def __init__(self, pool, players):
        self.pool = pool
        self.seats = {p: pool.sit() for p in players}  # leak: play drops everyone but the winner
        self.dealer = pool.sit()  # clean: finish stands the dealer

    def play(self, score):
        ranked = sorted(self.seats, key=score)
        winner = ranked[-1]
        self.seats = {winner: self.seats[winner]}
        return winner

    def finish(self):
        for seat in self.seats.values():
            self.pool.stand(seat)
        self.seats = {}
        self.pool.stand(self.dealer)
