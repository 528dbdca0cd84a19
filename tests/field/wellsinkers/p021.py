"""A pool made of closures: borrow and give_back over a hidden list of regex scanners."""
import re
import threading


def scanner_pool(pattern, cap):
    compiled = re.compile(pattern)
    spare = []
    lock = threading.Lock()
    count = 0

    def borrow():
        nonlocal count
        with lock:
            if spare:
                return spare.pop()
            if count >= cap:
                return None
            count += 1
        return {"rx": compiled, "hits": []}

    def give_back(scanner):
        scanner["hits"].clear()
        with lock:
            spare.append(scanner)

    return borrow, give_back


borrow, give_back = scanner_pool(r"\b[A-Z]{3}-\d+\b", 16)


def issue_keys(text):
    scanner = borrow()  # clean: given back after the copy
    if scanner is None:
        return []
    scanner["hits"].extend(scanner["rx"].findall(text))
    found = list(scanner["hits"])
    give_back(scanner)
    return found


def first_key(text):
    scanner = borrow()  # leak: returns the match without giving back
    if scanner is None:
        return None
    match = scanner["rx"].search(text)
    if match:
        return match.group(0)
    give_back(scanner)
    return None


def count_keys(lines):
    scanner = borrow()  # clean: given back in finally
    if scanner is None:
        return 0
    try:
        return sum(len(scanner["rx"].findall(line)) for line in lines)
    finally:
        give_back(scanner)


def has_keys(lines):
    for line in lines:
        scanner = borrow()  # leak: one a line, none given back
        if scanner is not None and scanner["rx"].search(line):
            return True
    return False
