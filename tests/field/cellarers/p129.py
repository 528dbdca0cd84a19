import queue
import threading


class Subscription:
    def __init__(self, broker, topic):
        self.broker = broker
        self.topic = topic
        self.inbox = queue.Queue(100)

    def get(self, timeout):
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self):
        self.broker._detach(self)


class Broker:
    def __init__(self):
        self._subs = {}
        self._lock = threading.Lock()

    def subscribe(self, topic):
        sub = Subscription(self, topic)
        with self._lock:
            self._subs.setdefault(topic, []).append(sub)
        return sub

    def _detach(self, sub):
        with self._lock:
            self._subs[sub.topic].remove(sub)

    def publish(self, topic, message):
        for sub in list(self._subs.get(topic, ())):
            sub.inbox.put(message)


def wait_for_reply(broker, topic, request):
    sub = broker.subscribe(topic)  # clean: closed in finally
    try:
        broker.publish(topic + ".req", request)
        return sub.get(5.0)
    finally:
        sub.close()


def wait_until(broker, topic, predicate, tries):
    sub = broker.subscribe(topic)  # leak: the wanted message returns out of the loop
    for _ in range(tries):
        message = sub.get(1.0)
        if message is not None and predicate(message):
            return message
    sub.close()
    return None


class Dashboard:
    def __init__(self, broker):
        self.sub = broker.subscribe("metrics")  # clean: closed in stop()

    def stop(self):
        self.sub.close()


def topic_active(broker, topic):
    sub = broker.subscribe(topic)  # leak: the subscription remains at the broker
    return sub.get(0.2) is not None
