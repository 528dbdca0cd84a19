import subprocess


class Browser:
    def __init__(self, argv):
        self.proc = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pages = 0

    def render(self, url):
        self.pages += 1
        self.proc.stdin.write(url + "\n")
        self.proc.stdin.flush()
        return self.proc.stdout.readline()


class BrowserFarm:
    def __init__(self, argv, size, pages_each=100):
        self.argv = argv
        self.pages_each = pages_each
        self.ready = [Browser(argv) for _ in range(size)]
        self.working = {}

    def checkout(self):
        b = self.ready.pop()
        return self.working.setdefault(b.proc.pid, b)

    def checkin(self, browser):
        if browser.pages >= self.pages_each:
            return self.scrap(browser)
        del self.working[browser.proc.pid]
        self.ready.append(browser)

    def scrap(self, browser):
        del self.working[browser.proc.pid]
        browser.proc.kill()
        self.ready.append(Browser(self.argv))


def screenshot(farm, url):
    b = farm.checkout()  # clean: scrapped after a crash, checked in otherwise
    try:
        shot = b.render(url)
    except BrokenPipeError:
        farm.scrap(b)
        return None
    farm.checkin(b)
    return shot


def title(farm, url):
    b = farm.checkout()  # leak: an empty answer returns without checkin
    page = b.render(url)
    if not page:
        return ""
    farm.checkin(b)
    return page.split("|")[0]


def crawl(farm, urls):
    b = farm.checkout()  # clean: checked in after all pages
    pages = [b.render(u) for u in urls]
    farm.checkin(b)
    return pages


def recycle(farm):
    for _ in range(len(farm.ready)):
        b = farm.checkout()  # leak: young browsers are passed over without checkin
        if b.pages > 10:
            farm.scrap(b)
