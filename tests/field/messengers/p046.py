"""Import jobs that check credentials out of a vault."""
import json


class CredentialVault:
    def __init__(self, logins):
        self._logins = list(logins)

    def check_out(self):
        return self._logins.pop() if self._logins else None

    def check_in(self, login):
        self._logins.append(login)


class ImportJob:
    def __init__(self, vault, remote):
        self.vault = vault
        self.remote = remote
        self.errors = []

    def login_for(self, source):
        if not source.startswith("ftp"):
            return None
        return self.vault.check_out()  # clean: handed to the caller

    def fetch(self, source):
        login = self.login_for(source)  # clean: the else and the handler both check in
        if login is None:
            return None
        try:
            raw = self.remote.read(source, login)
        except OSError as err:
            self.errors.append((source, str(err)))
            self.vault.check_in(login)
            return None
        else:
            self.vault.check_in(login)
        return raw

    def fetch_json(self, source):
        login = self.login_for(source)  # leak: the handler of a bad document returns
        if login is None:
            return None
        try:
            doc = json.loads(self.remote.read(source, login))
        except json.JSONDecodeError as err:
            self.errors.append((source, err.msg))
            return None
        else:
            self.vault.check_in(login)
        return doc

    def fetch_or(self, source, default):
        login = self.login_for(source)  # clean: finally checks in unless there is none
        try:
            return self.remote.read(source, login)
        except OSError:
            return default
        finally:
            if login is not None:
                self.vault.check_in(login)

    def sizes(self, sources):
        out = {}
        for source in sources:
            login = self.login_for(source)  # leak: the error is counted, the round ends without check-in
            if login is None:
                continue
            try:
                out[source] = self.remote.stat(source, login).size
                self.vault.check_in(login)
            except OSError as err:
                self.errors.append((source, str(err)))
        return out
