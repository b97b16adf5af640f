"""The parts of examples/train_moe.py in one process: its loader, its digests, its model and its flags."""

import copy
import importlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--no-ckpt", "--layers=2", "--hidden=32", "--heads=2", "--experts=4", "--batch=4", "--seq=16"]


@pytest.fixture
def moe() -> Iterator[SimpleNamespace]:
    """The example's modules, by name, with deterministic kernels switched on as the script does."""
    parts = ("data", "digest", "flags", "model", "parallel", "training")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        modules = {part: importlib.import_module(f"moe.{part}") for part in parts}
        script = importlib.import_module("train_moe")
    torch.use_deterministic_algorithms(True)
    yield SimpleNamespace(script=script, **modules)
    torch.use_deterministic_algorithms(False)


def build_loader(moe: SimpleNamespace, windows: int = 10, part: tuple[int, int] = (0, 1), augment: float = 0) -> Any:
    """A loader over `windows` sequences of four bytes; the first byte of a sequence is its number."""
    corpus = torch.arange(windows).repeat_interleave(4).to(torch.uint8)
    corpus = torch.cat([corpus, corpus[-1:]])
    return moe.data.Loader(corpus, seq=4, batch=4, part=part, seed=5, augment=augment)


def build_run(moe: SimpleNamespace, *more: str) -> SimpleNamespace:
    """Everything that the script makes for one process, freshly seeded."""
    flags = moe.flags.parse_flags([*SMALL, *more])
    sizes = dict.fromkeys(moe.parallel.AXES, 1)
    place = moe.parallel.Place.join(sizes, None)
    shape = moe.model.Shape(layers=2, hidden=32, heads=2, experts=4, top_k=2, seq=16, dropout=flags.dropout)
    stage = moe.model.Stage(shape, index=0, of=1, seed=flags.seed)
    optimizer = moe.training.make_optimizer(stage, flags)
    scheduler = moe.training.make_scheduler(optimizer, flags)
    loader = moe.data.Loader(moe.data.read_corpus(2000), seq=16, batch=4, part=(0, 1), seed=0, augment=flags.augment)
    trainer = moe.training.Trainer(stage, optimizer, scheduler, place, flags)
    moe.script.seed_everything(flags.seed, place)
    return SimpleNamespace(stage=stage, optimizer=optimizer, scheduler=scheduler, loader=loader, trainer=trainer)


def train(run: SimpleNamespace, steps: int) -> list[str]:
    return [run.trainer.step(run.loader.next()).hex() for _ in range(steps)]


def digests(moe: SimpleNamespace, run: SimpleNamespace) -> dict[str, str]:
    found: dict[str, str] = moe.digest.of_state(run.stage, run.optimizer, run.scheduler, run.loader)
    return found


def capture(run: SimpleNamespace) -> dict[str, Any]:
    stateful = ("stage", "optimizer", "scheduler", "loader")
    saved: dict[str, Any] = {name: copy.deepcopy(getattr(run, name).state_dict()) for name in stateful}
    legacy = np.random.get_state()  # noqa: NPY002 - the global generator is meant
    return saved | {"python": random.getstate(), "numpy": legacy, "torch": torch.get_rng_state()}


def bring_back(run: SimpleNamespace, saved: dict[str, Any], forgotten: str = "") -> None:
    setters: dict[str, Any] = {"python": random.setstate, "numpy": np.random.set_state, "torch": torch.set_rng_state}
    for name, state in saved.items():
        if name != forgotten:
            (setters.get(name) or getattr(run, name).load_state_dict)(state)


def numbers(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].tolist()


class TestLoader:
    def test_an_epoch_serves_each_sequence_at_most_once_and_the_next_one_is_shuffled_anew(
        self, moe: SimpleNamespace
    ) -> None:
        """Two whole batches of four fit into ten sequences: eight different ones, in another order each time."""
        loader = build_loader(moe)
        epochs = [numbers(loader.next()) + numbers(loader.next()) for _ in range(3)]
        assert all(max(Counter(epoch).values()) == 1 for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3

    @pytest.mark.parametrize("stop", [0, 1, 2, 3, 5])
    def test_a_restored_loader_goes_on_where_the_saved_one_stood(self, moe: SimpleNamespace, stop: int) -> None:
        """At the start, inside an epoch, at its end and in a later one: the next six batches are equal."""
        loader = build_loader(moe)
        for _ in range(stop):
            loader.next()
        state = copy.deepcopy(loader.state_dict())
        expected = [numbers(loader.next()) for _ in range(6)]
        fresh = build_loader(moe)
        fresh.next()
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state
        assert [numbers(fresh.next()) for _ in range(6)] == expected

    def test_parts_of_a_batch_make_the_whole_batch(self, moe: SimpleNamespace) -> None:
        """What two data-parallel ranks see is, in order, what one process would see; their states differ."""
        whole, halves = build_loader(moe), [build_loader(moe, part=(i, 2)) for i in range(2)]
        for _ in range(5):
            assert torch.equal(whole.next(), torch.cat([half.next() for half in halves]))
        assert halves[0].state_dict() != halves[1].state_dict()

    def test_augmentation_draws_from_python_and_from_numpy(self, moe: SimpleNamespace) -> None:
        """Either generator in another state gives other bytes: a restore that forgets one of them shows."""

        def served(python: int, legacy: int) -> list[Any]:
            random.seed(python)
            np.random.seed(legacy)  # noqa: NPY002 - the global generator is meant
            loader = build_loader(moe, augment=0.5)
            return [loader.next().tolist() for _ in range(4)]

        assert served(1, 1) == served(1, 1)
        assert served(1, 1) != served(2, 1)
        assert served(1, 1) != served(1, 2)

    def test_too_little_text_is_refused_in_words(self, moe: SimpleNamespace) -> None:
        """A batch that no epoch can fill would never end."""
        with pytest.raises(SystemExit, match="hold 3 sequences, a batch needs 4"):
            build_loader(moe, windows=3)


class TestDigest:
    def test_one_bit_in_any_tensor_changes_its_digest(self, moe: SimpleNamespace) -> None:
        """Also in tensors without dimensions, with one element, in bfloat16, and in those that are not contiguous."""
        for tensor in (
            torch.tensor(3.0),
            torch.ones(1, 1),
            torch.ones(3, dtype=torch.bfloat16),
            torch.arange(6.0).view(2, 3).T,
        ):
            before = moe.digest.of_tensor(tensor)
            assert moe.digest.of_tensor(tensor.clone()) == before
            module = torch.nn.Module()
            module.register_buffer("x", tensor.contiguous().clone())
            assert moe.digest.flip_bit(module, "x")
            assert moe.digest.of_tensor(module.get_buffer("x")) != before
            assert not moe.digest.flip_bit(module, "y")

    def test_digests_tell_dtype_shape_and_order_of_strides_apart(self, moe: SimpleNamespace) -> None:
        """Equal bytes are not equal tensors; equal values in another memory order are."""
        zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)]
        assert len({moe.digest.of_tensor(zero) for zero in zeros}) == 3
        square = torch.arange(4.0).view(2, 2)
        assert moe.digest.of_tensor(square.T) == moe.digest.of_tensor(square.T.contiguous())

    def test_objects_that_python_calls_equal_differ(self, moe: SimpleNamespace) -> None:
        """1, 1.0, True, "1" and the two zeros of floating point have digests of their own."""
        values = [1, 1.0, True, "1", b"1", [1], (1,), {1: None}, {"1": None}, 0.0, -0.0, None, np.int64(1)]
        assert len({moe.digest.of_object(value) for value in values}) == len(values)

    def test_an_object_without_a_defined_digest_is_an_error(self, moe: SimpleNamespace) -> None:
        """A judge that skips what it does not know would call it equal."""
        with pytest.raises(TypeError, match="object"):
            moe.digest.of_object({"a": [object()]})

    def test_lines_are_appended_whole(self, moe: SimpleNamespace, tmp_path: Path) -> None:
        """A run that starts again adds to what the killed one wrote."""
        for step in (1, 2):
            moe.digest.append_line(tmp_path / "d.0", {"step": step})
        assert [json.loads(line) for line in (tmp_path / "d.0").read_text().splitlines()] == [
            {"step": 1},
            {"step": 2},
        ]


class TestModel:
    def test_two_runs_are_equal_to_the_bit(self, moe: SimpleNamespace) -> None:
        """Equal flags give equal losses and digests, with dropout and augmentation on."""
        first, second = build_run(moe), build_run(moe)
        # One after the other: they share the process's generators.
        moe.script.seed_everything(0, SimpleNamespace(data_part=(0, 1), coord={"pp": 0}))
        losses, state = train(first, 4), digests(moe, first)
        moe.script.seed_everything(0, SimpleNamespace(data_part=(0, 1), coord={"pp": 0}))
        assert train(second, 4) == losses
        assert digests(moe, second) == state

    def test_what_is_digested_is_all_that_a_resumed_run_needs(self, moe: SimpleNamespace) -> None:
        """Bring back model, optimizer, schedule, loader and the three generators: the future is equal to the bit."""
        run = build_run(moe)
        train(run, 3)
        saved = capture(run)
        at_save = digests(moe, run)
        expected = train(run, 3), digests(moe, run)
        fresh = build_run(moe)
        bring_back(fresh, saved)
        assert digests(moe, fresh) == at_save
        assert (train(fresh, 3), digests(moe, fresh)) == expected

    @pytest.mark.parametrize("forgotten", ["loader", "scheduler", "optimizer", "stage", "python", "numpy", "torch"])
    def test_whatever_is_forgotten_shows(self, moe: SimpleNamespace, forgotten: str) -> None:
        """Nothing in the state is idle: leave any part out, and the resumed run goes another way."""
        run = build_run(moe, "--augment=0.5")
        train(run, 3)
        saved = capture(run)
        expected = train(run, 3)
        fresh = build_run(moe, "--augment=0.5")
        bring_back(fresh, saved, forgotten)
        assert train(fresh, 3) != expected

    def test_stages_hold_the_parameters_of_the_whole_model_each_once(self, moe: SimpleNamespace) -> None:
        """Names are global, and first values depend on seed and name, not on how many stages there are."""
        shape = moe.model.Shape(layers=5, hidden=16, heads=2, experts=4, top_k=2, seq=8, dropout=0.0)
        whole = moe.model.Stage(shape, index=0, of=1, seed=3).state_dict()
        stages = [moe.model.Stage(shape, index=i, of=2, seed=3).state_dict() for i in range(2)]
        assert not stages[0].keys() & stages[1].keys()
        parts = stages[0] | stages[1]
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], whole[name]) for name in whole)
        assert not torch.equal(whole["layers.1.attn.qkv.weight"], whole["layers.3.attn.qkv.weight"])

    def test_each_byte_gets_the_weighted_sum_of_its_experts(self, moe: SimpleNamespace) -> None:
        """Routing, sorting and bringing back agree with a plain loop over bytes and experts."""
        shape = moe.model.Shape(layers=2, hidden=8, heads=2, experts=4, top_k=2, seq=6, dropout=0.0)
        mixture = moe.model.Stage(shape, index=0, of=1, seed=1).mixtures()[0]
        mixture.router.weight.data *= 100  # so that the choice is not a matter of rounding
        x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
        share = mixture.router(x).softmax(-1)
        expected = torch.zeros_like(x)
        for at in np.ndindex(3, 6):
            for expert in share[at].topk(2).indices.tolist():
                up, down = mixture.experts.up[expert], mixture.experts.down[expert]
                expected[at] += share[at][expert] * (torch.nn.functional.gelu(x[at] @ up) @ down)
        torch.testing.assert_close(mixture(x), expected)
        assert mixture.load.sum() == 3 * 6 * 2

    def test_gradients_are_clipped_to_the_norm_of_the_whole(self, moe: SimpleNamespace) -> None:
        """In one process the clip equals torch's own."""
        run = build_run(moe, "--dropout=0")
        run.trainer._gradients(run.loader.next())
        twin = copy.deepcopy(run.stage)
        for mine, other in zip(run.stage.parameters(), twin.parameters(), strict=True):
            other.grad = mine.grad.clone()
        run.trainer._clip()
        assert torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5) > 0.5
        for mine, other in zip(run.stage.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp=0"], "must be at least 1: --tp"),
        (["--pp=2"], "two layers or more"),
        (["--tp=4"], "--heads 2 must be a multiple of --tp 4"),
        (["--experts=3", "--dp-shard=2"], "--experts 3 must be a multiple"),
        (["--top-k=9"], "must lie in 1..4"),
        (["--dp-shard=4"], "must be a multiple of dp_replicate x dp_shard x micro = 8"),
        (["--steps=three"], "invalid int value"),
    ],
)
def test_flags_that_do_not_fit_together_are_a_usage_error(
    moe: SimpleNamespace, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and the rule that was broken."""
    with pytest.raises(SystemExit) as caught:
        moe.flags.parse_flags([*SMALL, *flags])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_mesh_that_the_launcher_did_not_start_is_refused(
    moe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says how to start it."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node 2"):
        moe.script.main([*SMALL, "--tp=2"])
