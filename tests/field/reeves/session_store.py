"""Multi-turn chat sessions: KV handles parked between turns. Plain functions over module tables."""
import time

HANDLE_LIMIT = 512
_next_handle = 0
_open_handles = {}
_reusable = []
_pool_bytes = 8 << 30

sessions = {}      # sid -> {"turns": [...], "current": turn or None, "title": handle or None, "seen": float}
parked = {}        # sid -> (handle, bytes, parked_at)
stats = {"turns": 0, "expired": 0, "restored": 0}


def open_handle(tokens):
    global _next_handle
    if _reusable:
        handle = _reusable.pop()
    elif _next_handle < HANDLE_LIMIT:
        handle = _next_handle
        _next_handle += 1
    else:
        return None
    _open_handles[handle] = tokens
    return handle


def close_handle(handle):
    _open_handles.pop(handle)
    _reusable.append(handle)


def book_bytes(n):
    global _pool_bytes
    if n > _pool_bytes:
        return False
    _pool_bytes -= n
    return True


def unbook_bytes(n):
    global _pool_bytes
    _pool_bytes += n


def create(sid):
    if sid in sessions:
        return False
    sessions[sid] = {"turns": [], "current": None, "title": None, "seen": time.time()}
    return True


def begin_turn(sid, text, tokenizer):
    session = sessions[sid]
    if session["current"] is not None:
        return False
    tokens = tokenizer(text)
    handle = open_handle(len(tokens))  # clean: near miss, end_turn moves it to turns, which delete closes
    if handle is None:
        return False
    draft = open_handle(0)  # leak: interrupt closes the main handle and drops the draft one
    session["current"] = {"handle": handle, "draft": draft, "text": text, "reply": []}
    session["seen"] = time.time()
    return True


def end_turn(sid):
    session = sessions[sid]
    turn, session["current"] = session["current"], None
    if turn["draft"] is not None:
        close_handle(turn["draft"])
    session["turns"].append((turn["handle"], turn["text"], "".join(turn["reply"])))
    stats["turns"] += 1
    return len(session["turns"])


def interrupt(sid):
    session = sessions[sid]
    turn = session["current"]
    if turn is None:
        return ""
    close_handle(turn["handle"])
    session["current"] = None
    return "".join(turn["reply"])


def make_title(sid, summarize):
    session = sessions[sid]
    if session["title"] is not None:
        close_handle(session["title"])
    session["title"] = open_handle(32)  # clean: near miss, the former one is closed above, the last by delete
    return summarize(session["title"], [text for _, text, _ in session["turns"]])


def regenerate(sid, model):
    """Replaces the answer of the last turn."""
    turns = sessions[sid]["turns"]
    if not turns:
        return None
    _, text, _ = turns[-1]
    handle = open_handle(len(text))  # leak: one more regenerate replaces the tuple and drops the handle in it
    if handle is None:
        return None
    reply = model(handle, text)
    turns[-1] = (handle, text, reply)
    return reply


def edit_last(sid, text, model):
    turns = sessions[sid]["turns"]
    if not turns:
        return None
    handle = open_handle(len(text))  # clean: near miss, the replaced handle is closed, this by delete
    if handle is None:
        return None
    old, _, _ = turns.pop()
    close_handle(old)
    reply = model(handle, text)
    turns.append((handle, text, reply))
    return reply


def park(sid, size):
    if sid in parked or not book_bytes(size):  # leak: expire closes the handle, forgets the bytes
        return False
    handle = open_handle(0)  # clean: near miss, unpark and expire both close it
    if handle is None:
        unbook_bytes(size)
        return False
    parked[sid] = (handle, size, time.time())
    return True


def unpark(sid, restore):
    entry = parked.pop(sid, None)
    if entry is None:
        return False
    handle, size, _ = entry
    restore(handle)
    close_handle(handle)
    unbook_bytes(size)
    stats["restored"] += 1
    return True


def expire(max_age):
    now = time.time()
    for sid, (handle, _, since) in list(parked.items()):
        if now - since > max_age:
            del parked[sid]
            close_handle(handle)
            stats["expired"] += 1


def delete(sid):
    session = sessions.get(sid)
    if session is None or session["current"] is not None or sid in parked:
        return False
    del sessions[sid]
    for handle, *_ in session["turns"]:
        close_handle(handle)
    if session["title"] is not None:
        close_handle(session["title"])
    return True
