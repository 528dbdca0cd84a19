# take: sit_down()
# give: stand_up(X)
# gets: optional
import os
import threading

SEATS = int(os.environ.get("ROLLOUT_SEATS", "64"))


def _make_table(n):
    vacant = list(range(n - 1, -1, -1))
    guard = threading.Lock()
    stats = {"seated": 0, "turned_away": 0}

    def sit():
        with guard:
            if not vacant:
                stats["turned_away"] += 1
                return None
            stats["seated"] += 1
            return vacant.pop()

    def stand(seat):
        with guard:
            if seat in vacant:
                raise ValueError(f"seat {seat} is vacant already")
            vacant.append(seat)

    def census():
        with guard:
            return dict(stats, vacant=len(vacant))

    return sit, stand, census


sit_down, stand_up, seat_census = _make_table(SEATS)
