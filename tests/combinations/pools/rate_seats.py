# take: P.sit(key)
# give: P.stand(key)
# gets: answer
# type: FairSeats
import logging
import threading

logger = logging.getLogger(__name__)


class FairSeats:
    """Shared seats with a guaranteed minimum for every listed customer."""

    def __init__(self, total, guaranteed):
        self._guaranteed = dict(guaranteed)
        self._shared_left = total - sum(self._guaranteed.values())
        assert self._shared_left >= 0
        self._sitting = {}
        self._lock = threading.Lock()
        self.turned_away = 0

    def _over(self, who):
        return self._sitting.get(who, 0) - self._guaranteed.get(who, 0)

    def sit(self, who):
        with self._lock:
            if self._over(who) >= 0:
                if self._shared_left == 0:
                    self.turned_away += 1
                    logger.info("turned %s away", who)
                    return False
                self._shared_left -= 1
            self._sitting[who] = self._sitting.get(who, 0) + 1
            return True

    def stand(self, who):
        with self._lock:
            if self._sitting.get(who, 0) == 0:
                raise KeyError(f"{who} is not sitting")
            if self._over(who) > 0:
                self._shared_left += 1
            self._sitting[who] -= 1
