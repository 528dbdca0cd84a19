"""What `poolaudit rule --new` writes: a rule that works and fixtures that pass, to be changed bit by bit."""

RULE = '''\
"""{code} {name}: say in one line what is wrong.

What: what the rule looks for, in terms of what it is told (`auditor/facts.py`). This one looks for leases
that are held under the name `wrong`.

Why: what goes wrong at run time if nobody acts on it. If nothing does, there is no rule.

Not reported: the near misses, each of which has a fixture.

Example:
    wrong = pool.allocate(8)

Fix: what to do instead, and whether that keeps the program's meaning.
"""

from collections.abc import Iterator

from auditor.facts import Facts, named
from auditor.model import Finding, Severity
from auditor.rule import Meta

# Off until what it says on real code has been read: see docs/how-to-add-a-rule.md.
META = Meta(code="{code}", name="{name}", severity=Severity.WARNING, default=False)

BAD = """\\
def f(pool):
    wrong = pool.allocate(8)
    pool.deallocate(wrong)
"""

GOOD = """\\
def f(pool):
    right = pool.allocate(8)
    pool.deallocate(right)
"""


def check(facts: Facts) -> Iterator[Finding]:
    for lease in facts.leases:
        if lease.holder == "wrong":
            yield META.finding(lease.span, lease.symbol, f"{{named(lease)}} is a name for nothing good")
'''

FIXTURE = '''\
"""{name}: what is marked is reported, and nothing else. Keep at least two marks and five near misses."""


def in_a_function_bad(pool):
    wrong = pool.allocate(8)  # expect: {code}
    pool.deallocate(wrong)


class InAMethod_bad:
    def f(self, pool):
        wrong = pool.allocate(8)  # expect: {code}
        pool.deallocate(wrong)


def another_name_ok(pool):
    right = pool.allocate(8)
    pool.deallocate(right)


def part_of_the_name_ok(pool):
    wrongly = pool.allocate(8)
    pool.deallocate(wrongly)


def no_lease_ok(pool):
    wrong = len("12345678")
    return wrong


def no_name_ok(pool):
    with pool.lease(8) as wrong:
        return wrong.sum()


def in_a_string_ok(pool):
    return "wrong = pool.allocate(8)"
'''
