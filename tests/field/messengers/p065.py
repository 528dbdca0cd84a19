"""Plug-in hosts of an editor: the close chain runs through several bases."""


class WorkerPool:
    def __init__(self, pids):
        self._waiting = list(pids)

    def fork(self):
        return self._waiting.pop()

    def reap(self, pid):
        self._waiting.append(pid)


class Host:
    def __init__(self, pool):
        self.pool = pool
        self.pid = pool.fork()  # clean: reaped by close
        self.open = True

    def request(self, what):
        return f"{self.pid}:{what}"

    def close(self):
        self.open = False
        self.pool.reap(self.pid)


class Logged:
    def close(self):
        print("closing", type(self).__name__)
        super().close()


class Counted:
    live = 0

    def close(self):
        type(self).live -= 1


class LintHost(Logged, Host):
    pass


class SpellHost(Counted, Host):
    pass


class FormatHost(Host):
    def close(self):
        if self.open:
            super().close()


def lint(pool, text):
    host = LintHost(pool)  # clean: the mixin passes close on to the base
    answer = host.request(f"lint {len(text)}")
    host.close()
    return answer


def spell(pool, text):
    host = SpellHost(pool)  # leak: Counted.close comes first and does not call super
    answer = host.request(f"spell {len(text)}")
    host.close()
    return answer


def tidy(pool, text, rounds):
    host = FormatHost(pool)  # clean: closed once, the second close does nothing
    for _ in range(rounds):
        text = host.request(text)
        if not text:
            host.close()
    host.close()
    return text


def languages(pool, names):
    known = []
    for name in names:
        host = LintHost(pool)  # leak: continue on an empty answer
        answer = host.request(f"lang {name}")
        if answer.endswith("?"):
            continue
        known.append(answer)
        host.close()
    return known
