"""Resolver: query numbers of sixteen bits, drawn at random and in flight until answered."""
import random


class QueryIds:
    def __init__(self, rng=None):
        self.rng = rng or random.SystemRandom()
        self.flying = {}

    def draw_id(self, question):
        while True:
            qid = self.rng.randrange(65536)
            if qid not in self.flying:
                self.flying[qid] = question
                return qid

    def question(self, qid):
        return self.flying.get(qid)

    def land(self, qid):
        self.flying.pop(qid, None)


class Resolver:
    def __init__(self, ids, sock, cache):
        self.ids = ids
        self.sock = sock
        self.cache = cache

    def ask(self, name):
        qid = self.ids.draw_id(name)  # clean: landed in finally
        try:
            self.sock.send(qid, name)
            return self.sock.wait(qid)
        finally:
            self.ids.land(qid)

    def ask_async(self, name):
        qid = self.ids.draw_id(name)  # clean: in flight until on_answer() lands it
        self.sock.send(qid, name)
        return qid

    def on_answer(self, qid, answer):
        self.cache[self.ids.question(qid)] = answer
        self.ids.land(qid)

    def ask_cached(self, name):
        qid = self.ids.draw_id(name)  # leak: a cached answer returns with the number in flight
        if name in self.cache:
            return self.cache[name]
        self.sock.send(qid, name)
        answer = self.sock.wait(qid)
        self.ids.land(qid)
        return answer

    def ask_servers(self, name, servers):
        for server in servers:
            qid = self.ids.draw_id(name)  # leak: servers that are down continue without landing
            if not self.sock.send(qid, name, server):
                continue
            answer = self.sock.wait(qid)
            self.ids.land(qid)
            if answer:
                return answer
        return None
