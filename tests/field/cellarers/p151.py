"""Prepared statements: cached for each text, given out once at a time."""
from dataclasses import dataclass


@dataclass
class Prepared:
    sql: str
    handle: int
    in_use: bool = False


class StatementCache:
    def __init__(self, driver):
        self.driver = driver
        self.by_sql = {}

    def prepare(self, sql):
        for st in self.by_sql.setdefault(sql, []):
            if not st.in_use:
                st.in_use = True
                return st
        st = Prepared(sql, self.driver.compile(sql), True)
        self.by_sql[sql].append(st)
        return st

    def reset(self, st):
        self.driver.clear_bindings(st.handle)
        st.in_use = False


class UserDao:
    FIND = "SELECT name FROM users WHERE id = ?"
    ADD = "INSERT INTO users VALUES (?, ?)"

    def __init__(self, statements, driver):
        self.statements = statements
        self.driver = driver

    def find(self, uid):
        st = self.statements.prepare(self.FIND)  # clean: reset in finally
        try:
            return self.driver.query_one(st.handle, uid)
        finally:
            self.statements.reset(st)

    def name_or(self, uid, default):
        st = self.statements.prepare(self.FIND)  # leak: the default is returned with the statement in use
        row = self.driver.query_one(st.handle, uid)
        if not row:
            return default
        self.statements.reset(st)
        return row[0]

    def add_all(self, users):
        st = self.statements.prepare(self.ADD)  # clean: one statement for all, then reset
        for uid, name in users:
            self.driver.execute(st.handle, uid, name)
        self.statements.reset(st)

    def add_checked(self, users):
        for uid, name in users:
            st = self.statements.prepare(self.ADD)  # leak: nameless users continue with the statement
            if not name:
                continue
            self.driver.execute(st.handle, uid, name)
            self.statements.reset(st)
