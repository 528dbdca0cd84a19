class PagedStore:
    def __init__(self, pages):
        self._vacant = list(range(pages))
        self._table = {}

    def claim(self, owner):
        page = self._vacant.pop()
        self._table[page] = owner
        return page

    def disclaim(self, page):
        del self._table[page]
        self._vacant.append(page)


class Request:
    def __init__(self, rid, prompt):
        self.rid = rid
        self.prompt = prompt
        self.page = None
        self.extra = None
        self.output = []


class Worker:
    def __init__(self, store, limit):
        self.store = store
        self.limit = limit

    def prepare(self, request):
        if request.page is None:
            request.page = self.store.claim(request.rid)  # clean: complete and abort disclaim it
        return len(request.prompt)

    def extend(self, request):
        if request.extra is None and len(request.output) > self.limit // 2:
            request.extra = self.store.claim(request.rid)  # leak: abort disclaims only the first page

    def step(self, request, sample):
        self.extend(request)
        token = sample(request.prompt, request.output)
        request.output.append(token)
        if token == 0 or len(request.output) >= self.limit:
            self.complete(request)
            return False
        return True

    def complete(self, request):
        if request.page is not None:
            self.store.disclaim(request.page)
        if request.extra is not None:
            self.store.disclaim(request.extra)
        request.page = request.extra = None

    def abort(self, request):
        if request.page is not None:
            self.store.disclaim(request.page)
        request.page = None
        request.extra = None
        request.output.clear()


def embed(store, request, encode):
    page = store.claim(request.rid)  # clean: disclaimed below
    vector = encode(page, request.prompt)
    store.disclaim(page)
    return vector


def requeue(worker, request, queue):
    if request.extra is None:
        request.extra = worker.store.claim(request.rid)  # leak: abort forgets the extra page
    request.output = []
    queue.append(request)


def run_all(worker, queue, sample):
    finished = []
    while queue:
        request = queue.pop(0)
        worker.prepare(request)
        while worker.step(request, sample):
            if len(request.output) == 16 and queue:
                requeue(worker, request, queue)
                break
        else:
            finished.append(request.rid)
    return finished
