"""MQTT client: packet numbers from 1 to 65535 and the four steps of exactly-once delivery."""


class PacketIds:
    def __init__(self):
        self._last = 0
        self._phase = {}

    def allocate(self):
        for _ in range(65535):
            self._last = self._last % 65535 + 1
            if self._last not in self._phase:
                self._phase[self._last] = "publish"
                return self._last
        return 0

    def received(self, pid):
        self._phase[pid] = "pubrel"

    def complete(self, pid):
        return self._phase.pop(pid, None)


class MqttClient:
    def __init__(self, ids, wire, max_size=1 << 16):
        self.ids = ids
        self.wire = wire
        self.max_size = max_size
        self.inflight = {}

    def publish(self, topic, payload):
        pid = self.ids.allocate()  # clean: stored in inflight, completed by on_pubcomp()
        if pid == 0:
            return False
        self.inflight[pid] = (topic, payload)
        self.wire.publish(pid, topic, payload)
        return True

    def on_pubcomp(self, pid):
        self.inflight.pop(pid, None)
        self.ids.complete(pid)

    def publish_limited(self, topic, payload):
        pid = self.ids.allocate()  # leak: a payload too large returns with the number taken
        if pid == 0:
            return False
        if len(payload) > self.max_size:
            return False
        self.inflight[pid] = (topic, payload)
        self.wire.publish(pid, topic, payload)
        return True

    def subscribe(self, topic):
        pid = self.ids.allocate()  # clean: completed after the answer
        codes = self.wire.subscribe(pid, topic)
        self.ids.complete(pid)
        return codes

    def unsubscribe_all(self, topics):
        for topic in topics:
            pid = self.ids.allocate()  # leak: the numbers of the loop are never completed
            self.wire.unsubscribe(pid, topic)
