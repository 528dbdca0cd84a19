import logging
import queue
import statistics
import threading

from .credits import Bankrupt
from .panel import NoQuorum, Panel

logger = logging.getLogger("judgefarm")


class Unreadable(ValueError):
    pass


class Submission:
    def __init__(self, uid, prompt, answer, draw):
        self.uid, self.prompt, self.answer = uid, prompt, answer
        self.draw = draw
        self.score = None

    def conclude(self, score):
        self.score = score
        self.draw.settle()


class JudgeService:
    def __init__(self, purse, seats, client, models, threads=4):
        self.purse, self.seats, self.client, self.models = purse, seats, client, models
        self.inbox = queue.Queue()
        self.results = {}
        self._held = {}
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(threads)]

    def start(self):
        for t in self._threads:
            t.start()

    def submit(self, uid, prompt, answer):
        draw = self.purse.draw(len(answer) // 4, uid)  # clean: the submission owns it and the loop concludes every one
        self.inbox.put(Submission(uid, prompt, answer, draw))

    def submit_short(self, uid, prompt, answer, limit=20_000):
        draw = self.purse.draw_urgent(len(answer) // 4, uid)  # leak: a duplicate uid returns before the draw is handed over
        if draw is None:
            return False
        if uid in self.results:
            logger.info("%s is judged already", uid)
            return False
        self.inbox.put(Submission(uid, prompt, answer[:limit], draw))
        return True

    def _ask(self, seat, prompt, answer):
        text = self.client.ask(seat, prompt, answer)
        try:
            return float(text.rsplit("Score:", 1)[1])
        except (IndexError, ValueError):
            raise Unreadable(text[-60:]) from None

    def _loop(self):
        while True:
            sub = self.inbox.get()  # clean: concluded in the finally
            if sub is None:
                return
            score = None
            try:
                score = self._judge(sub)
            except (Unreadable, NoQuorum) as e:
                logger.warning("%s: %s", sub.uid, e)
            finally:
                sub.conclude(score)
                self.results[sub.uid] = score

    def _judge(self, sub):
        panel = Panel.convene(self.seats, self.models, quorum=2)  # clean: dissolved in the finally
        try:
            return statistics.median(self._ask(c, sub.prompt, sub.answer) for c in panel.chairs)
        finally:
            panel.dissolve()

    def compare(self, prompt, left, right):
        panel = Panel.convene_or_none(self.seats, self.models, quorum=3)  # leak: a tie without a foreman returns without dissolve()
        if panel is None:
            return None
        votes = sum(1 if self.client.prefers(c, prompt, left, right) else -1 for c in panel.chairs)
        if votes == 0:
            if not panel.elect_foreman():
                return None
            votes = 1 if self.client.prefers(panel.foreman, prompt, left, right) else -1
        panel.dissolve()
        return votes

    def single(self, prompt, answer):
        seat = self.seats.sit_any()  # clean: the finally covers the handler, too
        if seat is None:
            return None
        try:
            return self._ask(seat, prompt, answer)
        except Unreadable:
            return None
        finally:
            self.seats.stand(seat)

    def paid_single(self, prompt, answer):
        with self.purse.draw(64, "single"):  # clean: with statement
            return self.single(prompt, answer)

    def rubric(self, prompt, answer, items):
        """One draw pays for all; every item takes its part of it."""
        scores = {}
        with self.purse.draw(100 * len(items), "rubric") as whole:  # clean: the rest is settled at the exit and each part by itself
            for item in items:
                part = whole.split(100)  # clean: near miss, settled in the finally
                try:
                    scores[item] = self.client.ask("rubric", f"{prompt}\n{item}", answer)
                finally:
                    part.settle()
        return scores

    def both_orders(self, prompt, left, right):
        first = self.purse.draw(200, "order-1", timeout=5)  # leak: Bankrupt of the second draw is caught and returns None
        try:
            second = self.purse.draw(200, "order-2", timeout=5)  # clean: settled by the with statement below
        except Bankrupt:
            return None
        with first, second:
            return self.compare(prompt, left, right), self.compare(prompt, right, left)

    def hold(self, uid, amount):
        """Keeps credits for a later appeal."""
        self._held[uid] = self.purse.draw(amount, f"appeal {uid}")  # leak: a second hold for the same uid overwrites the first draw

    def appeal(self, uid):
        draw = self._held.pop(uid, None)
        if draw is not None:
            draw.settle()

    def close(self):
        for _ in self._threads:
            self.inbox.put(None)
        for t in self._threads:
            t.join()
        while not self.inbox.empty():
            sub = self.inbox.get_nowait()  # clean: concluded on the next lines
            if sub is not None:
                sub.conclude(None)
        for uid in list(self._held):
            self.appeal(uid)
        self.purse.close()
