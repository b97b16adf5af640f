"""What a rank says once, and its agent dies with, is said to the next agent: others would wait for it until their deadline."""

from __future__ import annotations

from typing import Any

import pytest

from ckptd.client.errors import Aborted, InvalidRequest
from ckptd.client.link import Attachment, SessionLostError
from ckptd.client.restoring import Restorer
from ckptd.client.saving import Saver
from ckptd.protos.agent_pb2 import RestoredStep


class Link:
    """A link whose agent dies with the first `deaths` calls."""

    def __init__(self, deaths: int) -> None:
        self.deaths, self.sessions = deaths, 0
        self.restored: RestoredStep | None = RestoredStep(step=3, timeline="t")
        self.said: list[tuple[str, Any]] = []

    def attached(self, *, deadline: float) -> Attachment:
        """A session, each time another one."""
        del deadline
        self.sessions += 1
        return Attachment(f"session-{self.sessions}", None)  # type: ignore[arg-type]

    def call(self, attachment: Attachment, method: str, request: Any, **_: Any) -> None:
        """Note what was said in which session."""
        assert request.session == attachment.session
        kept = type(request)()
        kept.CopyFrom(request)
        self.said.append((method, kept))
        if len(self.said) <= self.deaths:
            raise SessionLostError("the agent is gone")


def saver(link: Link) -> Saver:
    made = Saver.__new__(Saver)
    made._link = link  # type: ignore[assignment]
    return made


def test_that_a_rank_cannot_save_is_said_until_an_agent_has_heard_it() -> None:
    """To each new session, and once more than agents died."""
    link = Link(deaths=2)
    saver(link)._fail_step(7, Aborted("boom"))
    assert [(method, said.step, said.error.message) for method, said in link.said] == [("FailStep", 7, "boom")] * 3
    assert len({said.session for _, said in link.said}) == 3


def test_an_agent_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it answers is an answer, whatever it is; the save's own error counts."""
    link = Link(deaths=0)

    def refuse(*_: Any, **__: Any) -> None:
        link.said.append(("FailStep", None))
        raise InvalidRequest("no")

    monkeypatch.setattr(link, "call", refuse)
    saver(link)._fail_step(7, Aborted("boom"))
    assert len(link.said) == 1


@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_what_was_restored_is_said_to_the_next_agent(deaths: int) -> None:
    """Once: training does not wait for an agent that dies again and again."""
    link = Link(deaths=deaths)
    restorer = Restorer.__new__(Restorer)
    restorer._link = link  # type: ignore[assignment]
    restorer._done(link.attached(deadline=0.0), 4, None)
    assert len(link.said) == min(2, deaths + 1)
    assert {(said.attempt, said.restored.step, said.restored.timeline) for _, said in link.said} == {(4, 3, "t")}
