"""Depth-first crawl with pooled fetch handles, in recursive helpers."""
from urllib.parse import urljoin


class HandlePool:
    def __init__(self, handles):
        self._idle = list(handles)

    def pick_up(self):
        return self._idle.pop() if self._idle else None

    def lay_down(self, handle):
        handle.reset()
        self._idle.append(handle)


class Crawler:
    def __init__(self, pool, max_depth):
        self.pool = pool
        self.max_depth = max_depth
        self.pages = {}
        self.loops = 0

    def handle_for(self, url, retries=3):
        handle = self.pool.pick_up()  # clean: handed on, or laid down before the next try
        if handle is None or handle.open(url):
            return handle
        self.pool.lay_down(handle)
        if retries == 0:
            return None
        return self.handle_for(url, retries - 1)  # clean: handed to the caller

    def crawl(self, url, depth=0):
        handle = self.handle_for(url)  # clean: laid down before the recursion
        if handle is None:
            return 0
        body, links = handle.body(), handle.links()
        self.pool.lay_down(handle)
        self.pages[url] = body
        if depth >= self.max_depth:
            return 1
        return 1 + sum(self.crawl(urljoin(url, link), depth + 1) for link in links)

    def crawl_deep(self, url, depth=0):
        handle = self.handle_for(url)  # leak: a page seen before returns with the handle
        if handle is None:
            return 0
        final = handle.final_url()
        if final in self.pages:
            self.loops += 1
            return 0
        self.pages[final] = handle.body()
        count = 1
        for link in handle.links():
            if depth < self.max_depth:
                count += self.crawl_deep(urljoin(final, link), depth + 1)
        self.pool.lay_down(handle)
        return count

    def walk(self, handle, links):
        """Reads the links one after another and lays the handle down at the last one."""
        if not links:
            self.pool.lay_down(handle)
            return 0
        handle.open(links[0])
        self.pages[links[0]] = handle.body()
        return 1 + self.walk(handle, links[1:])

    def walk_list(self, start, links):
        handle = self.handle_for(start)  # clean: the recursive helper lays it down
        return self.walk(handle, links) if handle is not None else 0

    def exists(self, url):
        return self.handle_for(url, retries=0) is not None  # leak: compared with None and dropped
