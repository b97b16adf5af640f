"""That a generator cannot take its state is known before anything is touched, and a RandomState is a generator, too."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.client_agent import Make, fake_agent, make
from fixtures.fake_agent import FakeAgent
from torch import nn

from ckptd.client import InvalidRequest, rng
from ckptd.client.audit import audit
from ckptd.client.state import Collector

__all__ = ["fake_agent", "make"]


def drawn() -> list[float]:
    return [random.random(), np.random.random_sample(), float(torch.rand(()))]  # noqa: NPY002


def untouched_by_a_refused_restore(make: Make, fake_agent: FakeAgent, stored: object, here: object, match: str) -> None:
    """Save `stored` beside a module, restore into `here`: refused, the module as it was, and the agent told so."""
    saved = make()
    saved.track(model=nn.Linear(2, 2))
    saved.save(1, {"gen": stored}).wait()
    saved.close()
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    follows = drawn()
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    checkpointer = make()
    checkpointer.track(model=model)
    told = len(fake_agent.done)
    with pytest.raises(InvalidRequest, match=match):
        checkpointer.restore_into({"gen": here})
    assert torch.equal(model.weight, before)
    assert drawn() == follows
    assert [bool(done.error.message) for done in fake_agent.done[told:]] == [True]


def test_a_generator_of_another_kind_is_found_before_anything_is_touched(make: Make, fake_agent: FakeAgent) -> None:
    """The model stays as it is, and the agent hears that the restore failed."""
    other = np.random.Generator(np.random.Philox(1))
    untouched_by_a_refused_restore(
        make, fake_agent, np.random.default_rng(1), other, "gen: stored is the state of numpy PCG64"
    )


def test_a_state_that_does_not_fit_is_found_before_anything_is_touched(
    make: Make, fake_agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a generator of another version of Python; a copy is tried, not the generator itself."""
    monkeypatch.setattr("ckptd.client.generators.state_of", lambda _: (99, (1, 2), None))
    here = random.Random(7)
    expected = random.Random(7).random()
    untouched_by_a_refused_restore(make, fake_agent, random.Random(5), here, "gen: the stored state does not fit")
    assert here.random() == expected


def test_generators_of_the_process_that_do_not_fit_are_found_before_anything_is_touched(
    make: Make, fake_agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's fit, numpy's do not: none is set."""
    state = random.Random(11).getstate()
    torch_state = torch.get_rng_state().numpy().tobytes()
    wrong: dict[str, Any] = {"python": state, "numpy": ("PCG64", np.zeros(3), 0, 0, 0.0), "torch": torch_state}
    monkeypatch.setattr("ckptd.client.rng.capture", lambda: wrong)
    untouched_by_a_refused_restore(make, fake_agent, 1, 1, "random number generators does not fit")


def test_another_seed_on_an_old_numpy_is_found_before_anything_is_touched(
    make: Make, fake_agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be given another sequence to spawn from."""
    monkeypatch.setattr("ckptd.client.generators.np.__version__", "1.26.4")
    stored = np.random.default_rng(1)
    stored.spawn(2)
    untouched_by_a_refused_restore(make, fake_agent, stored, np.random.default_rng(2), "had another seed")


class Loader:
    """Shuffles with a RandomState."""

    def __init__(self, how: str) -> None:
        self.state = np.random.RandomState(0)
        self.how = how

    def state_dict(self) -> dict[str, Any]:
        forms = {"not": None, "tuple": self.state.get_state(), "dict": self.state.get_state(legacy=False)}
        return {"rs": forms[self.how]}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """Nothing."""


@pytest.mark.parametrize(("how", "found"), [("not", ["loader.state"]), ("tuple", []), ("dict", [])])
def test_a_random_state_that_is_not_saved_is_found(how: str, found: list[str]) -> None:
    """In both forms that numpy gives it is saved."""
    findings = audit({"loader": Loader(how)}, scope_of=Collector(()).scope_of, world=1).findings
    assert [finding.name for finding in findings if finding.kind == "untracked_generator"] == found


def test_the_random_state_of_the_process_is_none_of_a_things_own() -> None:
    """Libraries hold it that were given none: "rng" saves it."""
    loader = Loader("not")
    loader.state = rng.of_numpy()
    assert not audit({"loader": loader}, scope_of=Collector(()).scope_of, world=1).findings


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_a_random_state_goes_on(make: Make, kind: type[Any]) -> None:
    """With the normal number that it has in hand."""
    saved, other = np.random.RandomState(kind(1)), np.random.RandomState(kind(2))
    saved.standard_normal()
    checkpointer = make()
    checkpointer.save(1, {"gen": saved}).wait()
    expected = [saved.standard_normal(), saved.random_sample()]
    checkpointer.restore_into({"gen": other})
    assert [other.standard_normal(), other.random_sample()] == expected
