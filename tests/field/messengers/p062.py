"""Subscriptions of a market-data fan-out, kept in a table by client."""


class TopicSlots:
    def __init__(self, count):
        self._vacant = list(range(count))

    def subscribe(self):
        return self._vacant.pop() if self._vacant else None

    def unsubscribe(self, slot):
        self._vacant.append(slot)


class FanOut:
    def __init__(self, slots):
        self.slots = slots
        self.by_client = {}
        self.by_topic = {}
        self.watching = []

    def _slot(self, topic):
        slot = self.slots.subscribe()  # clean: handed to the caller
        if slot is not None:
            self.by_topic.setdefault(topic, 0)
            self.by_topic[topic] += 1
        return slot

    def join(self, client, topic):
        slot = self._slot(topic)  # clean: the one before is unsubscribed, this one stored
        if slot is None:
            return False
        before = self.by_client.pop(client, None)
        if before is not None:
            self.slots.unsubscribe(before)
        self.by_client[client] = slot
        return True

    def leave(self, client):
        slot = self.by_client.pop(client, None)
        if slot is not None:
            self.slots.unsubscribe(slot)

    def watch(self, topics):
        self.watching = [s for s in map(self._slot, topics) if s is not None]  # leak: unwatch drops the list

    def unwatch(self):
        count = len(self.watching)
        self.watching = []
        return count

    def sample(self, topics, source):
        prices = {}
        for topic in topics:
            slot = self._slot(topic)  # leak: a stale price breaks out with the slot
            if slot is None:
                break
            price, age = source.read(slot, topic)
            if age > 5:
                break
            prices[topic] = price
            self.slots.unsubscribe(slot)
        return prices

    def latest(self, topic, source):
        slot = self._slot(topic)  # clean: unsubscribed after the read
        if slot is None:
            return None
        price, _ = source.read(slot, topic)
        self.slots.unsubscribe(slot)
        return price
