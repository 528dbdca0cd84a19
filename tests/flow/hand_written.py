"""Programs whose verdicts a reader can check; `# title: verdict of each site in turn`, then the body."""

HAND_WRITTEN = """
# never released: normal
a = pool.acquire(1)

# released: kept
a = pool.acquire(1)
pool.release(a)

# call between: raise
a = pool.acquire(1)
work(a)
pool.release(a)

# early return: normal
a = pool.acquire(1)
if c0:
    return
pool.release(a)

# explicit raise: raise
a = pool.acquire(1)
if c0:
    raise ValueError
pool.release(a)

# assertion: raise
a = pool.acquire(1)
assert c0
pool.release(a)

# same flag twice: kept
if c0:
    a = pool.acquire(1)
if c0:
    pool.release(a)

# other flag: normal
a = pool.acquire(1)
if c0:
    pool.release(a)
if not c1:
    return

# opposite flags: kept
a = pool.acquire(1)
if c0:
    pool.release(a)
if not c0:
    pool.release(a)

# absent: kept
a = pool.acquire(1)
if a is None:
    return
pool.release(a)

# second fails: normal kept
a = pool.acquire(1)
b = pool.acquire(2)
if b is None:
    return
pool.release(a)
pool.release(b)

# second raises: raise kept
a = pool.acquire(1)
b = pool.acquire(2)
pool.release(a)
pool.release(b)

# finally: kept
a = pool.acquire(1)
try:
    work(a)
finally:
    #reached
    pool.release(a)

# finally returns: normal
a = pool.acquire(1)
try:
    return a
finally:
    #reached
    return None

# swallowed: swallowed
a = pool.acquire(1)
try:
    work(a)
except ValueError:
    #reached
    return
pool.release(a)

# narrow handler: raise
a = pool.acquire(1)
try:
    work()
except ValueError:
    #reached
    pool.release(a)
    #raising
    raise
pool.release(a)

# wide handler: kept
a = pool.acquire(1)
try:
    work()
except Exception:
    #reached
    pool.release(a)
    #raising
    raise
pool.release(a)

# returned: kept
return pool.acquire(1)

# returned with another: kept
a = pool.acquire(1)
b = None
return a, b

# returned sometimes: normal
a = pool.acquire(1)
return a if c0 else None

# stored: kept
a = pool.acquire(1)
holder.f1 = a
work()

# stored too late: raise
a = pool.acquire(1)
work()
sink.append(a)

# discarded: normal
pool.acquire(1)

# rebound: normal
a = pool.acquire(1)
a = None
raise ValueError

# rebound with an alias: kept
a = pool.acquire(1)
b = a
a = None
pool.release(b)

# deleted: normal
a = pool.acquire(1)
del a

# packed and unpacked: raise kept
p = (pool.acquire(1), pool.acquire(2))
a, b = p
pool.release(a)
pool.release(b)

# half unpacked: raise normal
p = (pool.acquire(1), pool.acquire(2))
a = p[0]
pool.release(a)

# conditional acquire: kept
a = pool.acquire(1) if c0 else None
if c0:
    pool.release(a)

# walrus: kept
if (a := pool.acquire(1)) is not None:
    pool.release(a)

# success flag: kept
a = pool.acquire(1)
d0 = False
try:
    work(a)
    d0 = True
finally:
    #reached
    if not d0:
        pool.release(a)
return a

# dead code: none
d0 = False
if d0:
    a = pool.acquire(1)

# only ever raises: raise
a = pool.acquire(1)
raise ValueError

# temporary swallowed: swallowed kept
try:
    p = (pool.acquire(1), pool.acquire(2))
except Exception:
    #reached
    return
return p

# lease needs nothing: raise
a = pool.acquire(1)
with pool.lease(8):
    pool.release(a)
"""
