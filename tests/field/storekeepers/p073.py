from collections import defaultdict


class InterestTable:
    """Subscription slots of a market data feed."""

    def __init__(self, slots):
        self._slots = set(range(slots))

    def subscribe(self):
        return self._slots.pop()

    def unsubscribe(self, slot):
        self._slots.add(slot)

    @property
    def left(self):
        return len(self._slots)


class Feed:
    def __init__(self, table):
        self.table = table
        self.by_client = defaultdict(set)
        self.symbols = {}
        self.quotes = {}

    def watch(self, client, symbol):
        if (client, symbol) in self.symbols:
            return self.symbols[client, symbol]
        slot = self.table.subscribe()  # leak: drop_client removes the set and unsubscribes nothing
        self.by_client[client].add(slot)
        self.symbols[client, symbol] = slot
        return slot

    def unwatch(self, client, symbol):
        slot = self.symbols.pop((client, symbol), None)
        if slot is None:
            return False
        self.by_client[client].discard(slot)
        self.table.unsubscribe(slot)
        return True

    def drop_client(self, client):
        slots = self.by_client.pop(client, set())
        for key in [k for k in self.symbols if k[0] == client]:
            del self.symbols[key]
        return len(slots)

    def on_quote(self, slot, price):
        self.quotes[slot] = price

    def sample(self, symbol, read):
        slot = self.table.subscribe()  # clean: unsubscribed below
        price = read(slot, symbol)
        self.table.unsubscribe(slot)
        return price


class Strategy:
    def __init__(self, table, name):
        self.table = table
        self.name = name
        self.legs = {}
        self.index = table.subscribe()  # clean: stop unsubscribes it

    def enter(self, near, far):
        if self.legs:
            return False
        self.legs["near"] = (near, self.table.subscribe())  # clean: exit gives it back
        self.legs["far"] = (far, self.table.subscribe())  # leak: roll replaces the far leg
        return True

    def roll(self, symbol):
        if "far" in self.legs:
            self.legs["far"] = (symbol, self.table.subscribe())  # leak: the next roll replaces it
        return self.table.left

    def exit(self):
        for symbol, slot in self.legs.values():
            self.table.unsubscribe(slot)
        self.legs = {}

    def stop(self):
        self.exit()
        self.table.unsubscribe(self.index)
