"""A generator of numpy's goes on to spawn the children that would have come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fixtures.client_agent import Make, fake_agent, make

from ckptd.client import InvalidRequest
from ckptd.client.generators import TrackedGenerator

__all__ = ["fake_agent", "make"]

Built = Callable[[], np.random.Generator]
SEEDS: dict[str, Built] = {
    "a number": lambda: np.random.default_rng(5),
    "words": lambda: np.random.default_rng([5, 2**70]),
    "an array": lambda: np.random.default_rng(np.array([5, 6], dtype=np.uint32)),
    "a child": lambda: np.random.default_rng(5).spawn(2)[1],
    "another bit generator": lambda: np.random.Generator(np.random.MT19937(np.random.SeedSequence(5, pool_size=8))),
}


def following(generator: np.random.Generator) -> list[float]:
    """Return what it draws next, and what its next children draw."""
    return [generator.random(), *(child.random() for child in generator.spawn(2))]


def restored(make: Make, generator: np.random.Generator, other: np.random.Generator) -> list[list[float]]:
    """Return what follows undisturbed, and in another generator after a restore."""
    checkpointer = make()
    checkpointer.save(1, {"generator": generator}).wait()
    expected = following(generator)
    checkpointer.restore_into({"generator": other})
    return [expected, following(other)]


@pytest.mark.parametrize("seed", SEEDS)
def test_children_go_on_from_where_they_were(make: Make, seed: str) -> None:
    """Into a fresh generator of the same seed; the sequence it was made from stays the one that others hold."""
    generator, other = SEEDS[seed](), SEEDS[seed]()
    generator.random()
    generator.spawn(3)
    held = other.bit_generator.seed_seq
    expected, found = restored(make, generator, other)
    assert found == expected
    assert other.bit_generator.seed_seq is held


@pytest.mark.parametrize("spawned", [0, 1, 7])
@pytest.mark.parametrize("seed", [5, None])
def test_of_another_seed_or_with_more_children_it_goes_on_too(make: Make, seed: int | None, spawned: int) -> None:
    """A generator without a seed has another one at every start; one that is rolled back has spawned more."""
    generator, other = np.random.default_rng(seed), np.random.default_rng(seed)
    generator.spawn(spawned)
    other.spawn(5)
    expected, found = restored(make, generator, other)
    assert found == expected


def loaded(generator: np.random.Generator, stored: dict[str, Any]) -> None:
    TrackedGenerator("generator", generator).load(stored)


def stored_of(generator: np.random.Generator) -> dict[str, Any]:
    found: dict[str, Any] = TrackedGenerator("generator", generator)._thing.state_dict()
    return found


def test_a_step_of_before_restores_as_it_did() -> None:
    """It has the state and nothing of children: those stay what they are here."""
    generator, other = np.random.default_rng(5), np.random.default_rng(5)
    generator.spawn(3)
    stored = stored_of(generator)
    del stored["seed"]
    loaded(other, stored)
    assert other.random() == generator.random()
    assert other.bit_generator.seed_seq.n_children_spawned == 0  # type: ignore[attr-defined]


def test_what_an_old_numpy_cannot_do_is_refused_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where children were spawned, and the sequence that is here cannot go on from there."""
    monkeypatch.setattr("ckptd.client.generators.np.__version__", "1.26.4")
    generator, same, other = np.random.default_rng(5), np.random.default_rng(5), np.random.default_rng(6)
    loaded(other, stored_of(generator))
    assert other.random() == generator.random()
    generator.spawn(3)
    loaded(same, stored_of(generator))
    assert following(same) == following(generator)
    with pytest.raises(
        InvalidRequest, match=r"generator: the generator that was saved had another seed.*\(5\)"
    ) as caught:
        loaded(other, stored_of(generator))
    assert "same seed" in caught.value.hint
