"""Loaders that keep their own position: torchdata's, and a stand-in with its interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make

__all__ = ["fake_agent", "make"]

ITEMS, BATCH = 40, 4


class StandIn:
    """What is needed of a StatefulDataLoader: an epoch in random order that can be left and taken up again."""

    def __init__(self) -> None:
        self._order: torch.Tensor | None = None
        self._at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self._order is None:
            self._order = torch.randperm(ITEMS)
        while self._at < ITEMS:
            self._at += BATCH
            yield self._order[self._at - BATCH : self._at]
        self._order, self._at = None, 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "at": self._at, "workers": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._at = state["order"], state["at"]


def torchdata() -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(list(range(ITEMS)), batch_size=BATCH, shuffle=True)


# torchdata tells torch of itself in a way that torch no longer wants to hear.
@pytest.mark.filterwarnings("ignore:.*set_vital")
@pytest.mark.parametrize("loader", [StandIn, torchdata])
@pytest.mark.parametrize("served", [1, 7, ITEMS // BATCH])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(make: Make, loader: Callable[[], Any], served: int) -> None:
    """The rest of the epoch, and the whole next one, are the batches that would have come: none twice, none left out."""
    torch.manual_seed(4)
    first = loader()
    checkpointer = make(audit="raise")
    checkpointer.track(loader=first)
    batches = iter(first)
    seen = [next(batches).tolist() for _ in range(served)]
    checkpointer.save(served).wait()
    rest = [batch.tolist() for batch in batches]
    following = [batch.tolist() for batch in first]
    checkpointer.close()
    assert sorted(item for batch in seen + rest for item in batch) == list(range(ITEMS))
    torch.manual_seed(99)
    other = loader()
    again = make()
    again.track(loader=other)
    assert again.restore(required=True)
    assert [batch.tolist() for batch in other] == rest
    assert [batch.tolist() for batch in other] == following
