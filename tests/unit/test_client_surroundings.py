"""What the code that saves holds besides what it tracks, as the event log tells it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptd.client.surroundings import kind_of_state, tracked_kinds, untracked

HERE = "of test_client_surroundings.py"


class Batches:
    def next(self) -> None: ...


class Holder:
    def __init__(self, **held: object) -> None:
        self.__dict__.update(held)


def found(**things: object) -> set[tuple[str, str]]:
    """Return what the caller holds: kind and name without the place."""
    told = untracked(sys._getframe(1), things)
    mine = [one for one in told if one.name.endswith(HERE) and not one.name.startswith(("things", "request"))]
    return {(one.kind, one.name.partition(" in ")[0]) for one in mine}


def test_what_a_caller_holds_and_does_not_track_is_named_by_its_variable() -> None:
    """Each kind of state; what is tracked, and what has no state, is not said."""
    net = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters())
    warmup = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _step: 1.0)
    noise, other, third = torch.Generator(), np.random.default_rng(0), random.Random(0)
    rows = DataLoader(TensorDataset(torch.zeros(2)))
    batches = Batches()
    loss, size, data = torch.nn.MSELoss(), 3, [torch.zeros(1)]
    assert found(net=net, sgd=sgd) == {
        ("scheduler", "warmup"),
        ("generator", "noise"),
        ("generator", "other"),
        ("generator", "third"),
        ("loader", "rows"),
        ("loader", "batches"),
    }
    assert found(net=net, sgd=sgd, warmup=warmup, noise=noise, other=other, third=third, rows=rows, b=batches) == set()
    del loss, size, data


def test_what_a_tracked_thing_holds_is_its_own_affair() -> None:
    """A loader's generator is saved by the loader, or the audit says that it is not."""
    noise = torch.Generator()
    holder = Holder(noise=noise)
    assert found(holder=holder) == set()


def test_things_are_found_where_a_caller_keeps_them() -> None:
    """In an object's attribute, a dict, a list; what holds one is not entered once it was named."""
    self = Holder(parts={"rows": Batches()}, noises=[torch.Generator()])
    plain = SimpleNamespace(train_loader=Holder(noise=torch.Generator()))
    assert found() == {
        ("loader", "self.parts['rows']"),
        ("generator", "self.noises[0]"),
        ("loader", "plain.train_loader"),
    }
    del self, plain


def test_callers_further_out_are_looked_at_too() -> None:
    """save() is often called by a helper."""
    outer = torch.Generator()

    def helper() -> list[str]:
        return [one.name for one in untracked(sys._getframe(), {}) if one.name.endswith(HERE)]

    assert "outer in test_callers_further_out_are_looked_at_too() " + HERE in helper()
    del outer


def test_an_iterator_that_stands_somewhere_is_a_loader_and_a_file_is_none() -> None:
    """What has a next item has a position."""

    def rows() -> Iterator[int]:
        yield 1

    assert kind_of_state(rows()) == "loader"
    assert kind_of_state(sys.stdout, "stdout") == ""
    assert kind_of_state([torch.zeros(1)], "batches") == ""
    assert kind_of_state(torch.nn.ReLU(), "act") == ""


def test_tracked_things_have_kinds_whatever_they_are_called() -> None:
    """Names are the user's."""
    net = torch.nn.Linear(2, 2)
    assert tracked_kinds({"a": net, "b": torch.optim.SGD(net.parameters()), "c": [net], "d": 3, "e": Batches()}) == {
        "a": "model",
        "b": "optimizer",
        "c": "model",
        "d": "object",
        "e": "loader",
    }
