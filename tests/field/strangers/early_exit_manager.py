"""Context managers written by hand around an arena of fixed-size pages."""
import contextlib


class PageArena:
    def __init__(self, n):
        self._pages = list(range(n))

    def grab(self):
        return self._pages.pop()

    def drop(self, page):
        self._pages.append(page)


class PageScope:
    def __init__(self, arena, quiet=False):
        self.arena = arena
        self.quiet = quiet
        self.page = None

    def __enter__(self):
        self.page = self.arena.grab()  # leak: __exit__ returns early on an exception
        return self.page

    def __exit__(self, exc_type, exc, tb):
        if exc_type is not None:
            return self.quiet
        self.arena.drop(self.page)
        return False


class StrictScope:
    def __init__(self, arena):
        self.arena = arena
        self.page = None

    def __enter__(self):
        self.page = self.arena.grab()  # clean: near miss, __exit__ drops first and looks at the exception after
        return self.page

    def __exit__(self, exc_type, exc, tb):
        self.arena.drop(self.page)
        if exc_type is None:
            return False
        return issubclass(exc_type, KeyError)


@contextlib.contextmanager
def page_or_none(arena, wanted):
    if not wanted:
        yield None
        return
    page = arena.grab()  # clean: near miss, the branch without a page left before
    try:
        yield page
    finally:
        arena.drop(page)


@contextlib.contextmanager
def page_and_flag(arena, fast):
    page = arena.grab()  # leak: the fast branch yields and returns without dropping
    if fast:
        yield page
        return
    try:
        yield page
    finally:
        arena.drop(page)


def write(arena, data):
    with PageScope(arena) as page:
        data[page] = page
    with StrictScope(arena) as page:
        data[page] = -page
    with page_or_none(arena, bool(data)) as page:
        if page is None:
            return 0
    with page_and_flag(arena, len(data) > 8) as page:
        data[page] = 0
    return len(data)


class Nested:
    """Re-entrant: the page is taken by the outermost entry and dropped by the outermost exit."""

    def __init__(self, arena):
        self.arena = arena
        self.depth = 0
        self.page = None

    def __enter__(self):
        if self.depth == 0:
            self.page = self.arena.grab()  # clean: near miss, depth counts the entries
        self.depth += 1
        return self.page

    def __exit__(self, *exc):
        self.depth -= 1
        if self.depth == 0:
            self.arena.drop(self.page)
            self.page = None
