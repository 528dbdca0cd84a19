# take: save_may_start()
# give: save_ended()
# gets: answer
import threading


def _throttle(limit, on_full=None):
    running = 0
    refused = 0
    lk = threading.Lock()

    def start():
        nonlocal running, refused
        with lk:
            if running < limit:
                running += 1
                return True
            refused += 1
            seen = refused
        if on_full is not None:
            on_full(seen)
        return False

    def end():
        nonlocal running
        with lk:
            assert running > 0, "save_ended() without save_may_start()"
            running -= 1

    return start, end


save_may_start, save_ended = _throttle(limit=2)
