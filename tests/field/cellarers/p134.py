"""Broker consumer: prefetched deliveries have to be settled by tag."""
from collections import deque


class Channel:
    def __init__(self, prefetch=20):
        self.prefetch = prefetch
        self.ready = deque()
        self.unsettled = {}
        self._tag = 0

    def pull(self):
        if not self.ready or len(self.unsettled) >= self.prefetch:
            return None, None
        body = self.ready.popleft()
        self._tag += 1
        self.unsettled[self._tag] = body
        return self._tag, body

    def ack(self, tag):
        del self.unsettled[tag]

    def nack(self, tag, requeue=True):
        body = self.unsettled.pop(tag)
        if requeue:
            self.ready.append(body)


class Mailer:
    def __init__(self, channel, smtp):
        self.channel = channel
        self.smtp = smtp

    def step(self):
        tag, body = self.channel.pull()  # clean: acked or nacked
        if tag is None:
            return False
        try:
            self.smtp.send(body)
        except OSError:
            self.channel.nack(tag)
            return False
        self.channel.ack(tag)
        return True

    def step_filtered(self, blocked):
        tag, body = self.channel.pull()  # leak: mail to a blocked address is never settled
        if tag is None:
            return
        if body["to"] in blocked:
            return
        self.smtp.send(body)
        self.channel.ack(tag)

    def peek(self):
        _, body = self.channel.pull()  # leak: the tag is thrown away
        return body

    def drain(self):
        count = 0
        while True:
            tag, body = self.channel.pull()  # clean: None ends the loop, otherwise acked
            if tag is None:
                break
            self.smtp.send(body)
            self.channel.ack(tag)
            count += 1
        return count
