"""Low-rank adapters merged for a request."""
import contextlib


class AdapterDeck:
    """Numbered places for adapters next to a base model."""

    def __init__(self, places):
        self._places = [None] * places

    def mount(self, adapter):
        for i, a in enumerate(self._places):
            if a is None:
                self._places[i] = adapter
                return i
        return None

    def unmount(self, i):
        self._places[i] = None


@contextlib.contextmanager
def mounted(deck, adapter):
    place = deck.mount(adapter)  # clean: unmounted in finally, None is yielded as it is
    try:
        yield place
    finally:
        if place is not None:
            deck.unmount(place)


def mount_all(deck, adapters):
    places = []
    for a in adapters:
        p = deck.mount(a)  # leak: places mounted before the one that fails stay
        if p is None:
            raise OverflowError("adapter deck")
        places.append(p)
    return places
