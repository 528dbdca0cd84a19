"""Inference sessions on models, at most so many for each; ended by their id."""
import uuid
from dataclasses import dataclass, field


@dataclass
class Session:
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class SessionBook:
    def __init__(self, per_model):
        self.per_model = per_model
        self._by_id = {}

    def open_session(self, model):
        if sum(s.model == model for s in self._by_id.values()) >= self.per_model.get(model, 0):
            return None
        session = Session(model)
        self._by_id[session.id] = session
        return session

    def end_session(self, session_id):
        self._by_id.pop(session_id, None)


class ChatService:
    def __init__(self, book: SessionBook, llm):
        self.book = book
        self.llm = llm
        self.users = {}

    def login(self, user, model):
        session = self.book.open_session(model)  # clean: users keeps the id, logout() ends it
        if session is None:
            return False
        self.users[user] = session.id
        return True

    def logout(self, user):
        self.book.end_session(self.users.pop(user))

    def ask(self, model, prompt):
        session = self.book.open_session(model)  # clean: ended in finally
        if session is None:
            return "busy"
        try:
            return self.llm.reply(session, prompt)
        finally:
            self.book.end_session(session.id)

    def ask_moderated(self, model, prompt):
        session = self.book.open_session(model)  # leak: a blocked prompt returns with the session open
        if session is None:
            return "busy"
        if self.llm.blocked(prompt):
            return "blocked"
        reply = self.llm.reply(session, prompt)
        self.book.end_session(session.id)
        return reply

    def warm(self, models, prompt):
        for model in models:
            session = self.book.open_session(model)  # leak: an empty reply continues, not ended
            if session is None:
                continue
            if not self.llm.reply(session, prompt):
                continue
            self.book.end_session(session.id)
