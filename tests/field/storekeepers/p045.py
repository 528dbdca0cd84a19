import struct


class PacketIds:
    """MQTT packet identifiers 1..65535."""

    def __init__(self):
        self._used = set()
        self._next = 1

    def new_id(self):
        while self._next in self._used:
            self._next = self._next % 65535 + 1
        self._used.add(self._next)
        return self._next

    def free_id(self, pid):
        self._used.discard(pid)


class Inflight:
    def __init__(self, pid, topic, payload):
        self.pid = pid
        self.topic = topic
        self.payload = payload
        self.tries = 0
        self.released = False


class MqttClient:
    def __init__(self, ids, write):
        self.ids = ids
        self.write = write
        self.outgoing = {}
        self.subscribing = {}

    def publish(self, topic, payload):
        pid = self.ids.new_id()  # leak: resend gives up after five tries and only deletes the entry
        self.outgoing[pid] = Inflight(pid, topic, payload)
        self._send(self.outgoing[pid])
        return pid

    def _send(self, msg):
        msg.tries += 1
        self.write(struct.pack("!H", msg.pid) + msg.topic.encode() + b"\0" + msg.payload)

    def on_pubrec(self, pid):
        if pid in self.outgoing:
            self.outgoing[pid].released = True

    def on_pubcomp(self, pid):
        msg = self.outgoing.pop(pid, None)
        if msg is not None:
            self.ids.free_id(msg.pid)

    def resend(self):
        given_up = []
        for pid, msg in list(self.outgoing.items()):
            if msg.tries >= 5:
                given_up.append(msg.topic)
                del self.outgoing[pid]
                continue
            self._send(msg)
        return given_up

    def subscribe(self, topic):
        pid = self.ids.new_id()  # clean: on_suback and on_close free it
        self.subscribing[pid] = topic
        self.write(struct.pack("!H", pid) + topic.encode())

    def on_suback(self, pid, code):
        topic = self.subscribing.pop(pid, None)
        if topic is None:
            return None
        self.ids.free_id(pid)
        return topic if code < 128 else None

    def unsubscribe(self, topic, wait):
        pid = self.ids.new_id()  # clean: freed after the wait
        self.write(struct.pack("!H", pid) + topic.encode())
        ok = wait(pid)
        self.ids.free_id(pid)
        return ok

    def on_close(self):
        for pid in list(self.outgoing) + list(self.subscribing):
            self.ids.free_id(pid)
        self.outgoing.clear()
        self.subscribing.clear()
