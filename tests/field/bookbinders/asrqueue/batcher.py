"""Takes one chunk of every session and runs them through the recogniser together."""
import logging
import threading

import torch

log = logging.getLogger("asr.batcher")


class Batcher(threading.Thread):
    def __init__(self, sessions, chunks, model, period=0.02):
        super().__init__(name="asr-batcher", daemon=True)
        self._sessions, self._chunks = sessions, chunks
        self._model, self._period = model, period
        self._halt = threading.Event()
        self.rounds = 0
        self.errors = 0

    def _collect(self):
        """(session, chunk) for each session that has something."""
        picked = []
        for s in self._sessions():
            chunk = s.pop()  # clean: near miss, put here when the session has no lane any more, else in the list that is returned
            if chunk is None:
                continue
            if s.lane is None:
                self._chunks.put(chunk)
                continue
            picked.append((s, chunk))
        return picked

    def _round(self):
        picked = self._collect()  # leak: a RuntimeError of the model is caught in run(), past the loop that puts the chunks
        if not picked:
            return
        audio = torch.stack([c for _, c in picked])
        rows = [s.lane.row for s, _ in picked]
        words = self._model(audio, rows)
        for (s, chunk), w in zip(picked, words):
            s.add_text(w)
            self._chunks.put(chunk)
        self.rounds += 1

    def run(self):
        while not self._halt.wait(self._period):
            try:
                self._round()
            except RuntimeError:
                self.errors += 1
                log.exception("round %d", self.rounds)

    def flush(self, session):
        """Everything that the session still has, chunk by chunk."""
        while True:
            chunk = session.pop()  # clean: put in the finally
            if chunk is None:
                return
            try:
                session.add_text(self._model(chunk[None], [session.lane.row])[0])
            finally:
                self._chunks.put(chunk)

    def stop(self):
        self._halt.set()
        self.join()
