"""Iterating pages: yield from, consumers that stop early, closers."""
from collections import deque
from contextlib import closing


class PageSource:
    def __init__(self, n):
        self.pages = deque(range(n))
        self.given = 0

    def claim_page(self):
        self.given += 1
        return self.pages.popleft()

    def unclaim_page(self, page):
        self.given -= 1
        self.pages.append(page)


def scan(source, n):
    for _ in range(n):
        page = source.claim_page()  # clean: near miss, finally also runs when the generator is closed
        try:
            yield page
        finally:
            source.unclaim_page(page)


def scan_twice(source, n):
    yield from scan(source, n)
    yield from scan(source, n)


def take_until(source, stop):
    page = source.claim_page()  # leak: reaching the stop page leaves the generator before unclaim
    while True:
        if page == stop:
            return
        yield page
        source.unclaim_page(page)
        page = source.claim_page()  # leak: same, the next page may be the stop page


def take_until_clean(source, stop):
    page = source.claim_page()  # clean: near miss, unclaimed behind the loop, or in finally
    try:
        while page != stop:
            yield page
            source.unclaim_page(page)
            page = source.claim_page()  # clean: near miss, the finally is for whichever page is current
    finally:
        source.unclaim_page(page)


def first_even(source):
    with closing(scan(source, 100)) as pages:
        for page in pages:
            if page % 2 == 0:
                return page
    return None


def total(source):
    return sum(scan_twice(source, 10))


def pages_list(source, n):
    return [source.claim_page() for _ in range(n)]  # clean: handed to the caller as a list


def with_list(source, n):
    pages = pages_list(source, n)  # clean: near miss, all unclaimed in a loop
    value = sum(pages)
    for page in pages:
        source.unclaim_page(page)
    return value


def with_list_filtered(source, n):
    pages = pages_list(source, n)  # leak: odd pages are filtered out and not unclaimed
    even = [p for p in pages if p % 2 == 0]
    value = sum(even)
    for page in even:
        source.unclaim_page(page)
    return value


def with_two_parts(source, n):
    pages = pages_list(source, n)  # clean: near miss, the two parts make up the list and both are unclaimed
    low, high = pages[: n // 2], pages[n // 2 :]
    value = sum(low) - sum(high)
    for part in (low, high):
        for page in part:
            source.unclaim_page(page)
    return value
