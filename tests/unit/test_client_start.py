"""Settings, meshes, credentials, the exchange through the job's store, and errors on the wire."""

from __future__ import annotations

import datetime as dt
import hashlib
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptd.client
from ckptd.client import config, errors
from ckptd.client.config import Config, Settings, resolve
from ckptd.client.credentials import make_credentials
from ckptd.client.errors import CkptdError, InvalidRequest, Unavailable, from_wire
from ckptd.client.mesh import Topology, topology
from ckptd.client.store_exchange import StoreExchange
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import AttachRequest
from ckptd.protos.error_pb2 import Reason
from ckptd.protos.snapshot_pb2 import Mesh


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment says nothing."""
    for name in Config.model_fields:
        monkeypatch.delenv(f"CKPTD_{name.upper()}", raising=False)


# ---------------------------------------------------------------- the package


def test_exports_are_sorted_and_there() -> None:
    """`from ckptd.client import *` gives exactly the public names."""
    assert ckptd.client.__all__ == sorted(ckptd.client.__all__)
    for name in ckptd.client.__all__:
        assert getattr(ckptd.client, name) is not None


# ---------------------------------------------------------------- settings


def test_arguments_win_over_a_config_and_a_config_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the environment over defaults; an empty variable is none."""
    monkeypatch.setenv("CKPTD_ROOT", "file:///env")
    monkeypatch.setenv("CKPTD_JOB", "env")
    monkeypatch.setenv("CKPTD_SLOTS", "5")
    monkeypatch.setenv("CKPTD_KEEP_LAST", "")
    found = resolve(None, {"job": "argument"})
    assert (found.root, found.job, found.slots, found.keep_last) == ("file:///env", "argument", 5, 0)
    given = Config(root="file:///config", job="config", slots=3)
    monkeypatch.setenv("CKPTD_SLOTS", "7")
    found = resolve(given, {"keep_last": 2})
    assert (found.root, found.job, found.slots, found.keep_last) == ("file:///config", "config", 3, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"slots": 0}, ["slots"]),
        ({"slots": 2, "keep_last": -1, "begin_timeout_s": 0}, ["keep_last", "begin_timeout_s"]),
        ({"transport": "pigeon"}, ["transport"]),
        ({"keep_lats": 1}, ["keep_lats"]),
        ({"root": "/plain/path"}, ["root", "file:///"]),
        ({"root": ""}, ["root", "CKPTD_ROOT"]),
        ({"job": ""}, ["job", "CKPTD_JOB"]),
        ({"job": "a\nb"}, ["job"]),
        ({"job": "x" * 129}, ["job"]),
    ],
)
def test_wrong_settings_are_one_error_that_names_all_of_them(arguments: dict[str, object], words: list[str]) -> None:
    """With the way out."""
    with pytest.raises(InvalidRequest) as caught:
        resolve(None, {"root": "file:///x", "job": "j", **arguments})
    for word in words:
        assert word in str(caught.value)
    assert caught.value.hint


def test_a_config_cannot_be_changed() -> None:
    """It is shared by everything below a Checkpointer."""
    with pytest.raises(ValueError):
        Config().slots = 3


def test_every_setting_is_described_and_can_be_an_argument() -> None:
    """Settings is Config's fields, but for the two that have arguments of their own."""
    assert set(get_type_hints(Settings)) == set(Config.model_fields) - {"root", "job"}
    assert all(field.description for field in Config.model_fields.values())


def test_the_socket_lies_where_the_agent_puts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By default in the runtime folder; an agent is started only where no socket was named."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Config().socket_path == Path("/run/user/7/ckptd/agent.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(Config().socket_path).startswith("/tmp/ckptd-")
    assert Config(run_dir=tmp_path).socket_path == tmp_path / "agent.sock"
    assert Config().may_start_agent
    assert not Config(socket=tmp_path / "s").may_start_agent
    assert not Config(embedded=False).may_start_agent


# ---------------------------------------------------------------- meshes


@pytest.fixture
def eight() -> Iterator[None]:
    """This process is rank 5 of 8; the others do nothing."""
    store = FakeStore()
    dist.init_process_group("fake", rank=5, world_size=8, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_without_a_process_group_the_world_is_one() -> None:
    """And a mesh of axis sizes must agree."""
    found = topology(None, None)
    assert (found.rank, found.world, found.axes, found.sizes, found.coordinate) == (0, 1, ("world",), (1,), (0,))
    assert topology({"dp": 1, "tp": 1}, None).coordinate == (0, 0)
    with pytest.raises(InvalidRequest, match=r"dp 2.*covers 2 ranks, but 1"):
        topology({"dp": 2}, None)


def test_a_launchers_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would believe to be the only one, and write what the others write."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(InvalidRequest, match=r"8 ranks.*not initialized"):
        topology(None, None)
    assert config.launched_world() == 8


def test_the_coordinate_is_the_meshs_own(eight: None) -> None:
    """Also where ranks are not numbered row-major; axis sizes number them so."""
    ranks = torch.tensor([[7, 6, 5, 4], [3, 2, 1, 0]])
    found = topology(DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")), None)
    assert (found.axes, found.sizes, found.coordinate, found.rank) == (("dp", "tp"), (2, 4), (0, 2), 5)
    assert topology({"pp": 2, "dp": 2, "tp": 2}, None).coordinate == (1, 0, 1)
    assert topology(None, None).coordinate == (5,)
    assert topology(DeviceMesh("cpu", torch.arange(8)), None).axes == ("axis0",)


def test_meshes_whose_ranks_are_numbered_otherwise_are_not_equal(eight: None) -> None:
    """Else a rank would get what another coordinate stored; row-major ones say nothing, as in records of older programs."""

    def told(ranks: torch.Tensor) -> Mesh:
        return topology(DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")), None).to_wire()

    plain, turned = torch.arange(8).reshape(2, 4), torch.arange(8).reshape(4, 2).T
    orders = [told(ranks).rank_order for ranks in (plain, turned, plain.flip(0))]
    assert orders[0] == b"" == topology({"dp": 2, "tp": 4}, None).to_wire().rank_order
    assert len(set(orders)) == 3
    assert orders[1] == hashlib.sha256(struct.pack("<8I", 0, 2, 4, 6, 1, 3, 5, 7)).digest()


def test_a_slice_of_the_mesh_is_refused(eight: None) -> None:
    """Each slice would be a job of its own on the same root."""
    mesh = DeviceMesh("cpu", torch.arange(8).reshape(2, 4), mesh_dim_names=("dp", "tp"))
    with pytest.raises(InvalidRequest, match="tp 4 covers 4 ranks, but 8"):
        topology(mesh["tp"], None)


def test_a_subset_has_ranks_of_its_own(eight: None) -> None:
    """process_group= numbers them from 0."""
    group = dist.new_group([1, 5, 7])
    found = topology(None, group)
    assert (found.rank, found.world, found.members) == (1, 3, (1, 5, 7))
    with pytest.raises(InvalidRequest, match="not in the process group"):
        topology(None, dist.new_group([0, 1]))


# ---------------------------------------------------------------- credentials


def test_credentials_are_a_pinned_certificate_its_key_and_a_token() -> None:
    """Fresh each time; valid around now although clocks differ."""
    now = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
    one, two = make_credentials(now), make_credentials(now)
    certificate = x509.load_pem_x509_certificate(one.certificate)
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "ckptd"
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
    assert certificate.not_valid_before_utc < now - dt.timedelta(days=1)
    assert certificate.not_valid_after_utc > now + dt.timedelta(days=365)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["ckptd"]
    assert len(one.token) == 32
    assert one.token != two.token
    assert one.private_key != two.private_key


# ---------------------------------------------------------------- the exchange


def ranks_of(store: Any, *members: int) -> list[Topology]:
    return [
        Topology(
            rank=rank,
            world=len(members),
            axes=("world",),
            sizes=(len(members),),
            coordinate=(rank,),
            members=members,
            store=store,
        )
        for rank in range(len(members))
    ]


def test_others_find_out_what_rank_0_says_however_late() -> None:
    """And a newer endpoint, when the coordinator came back elsewhere."""
    leader, other = _pair(HashStore())
    found: list[tuple[int, AttachRequest]] = []
    waiter = threading.Thread(target=lambda: found.append(other.wait(10)))
    waiter.start()
    leader.publish(AttachRequest(run_id="r", endpoint="h:1"), generation=0)
    waiter.join(10)
    assert [(number, one.run_id, one.endpoint) for number, one in found] == [(0, "r", "h:1")]
    assert other.newest(after=0) is None
    leader.publish(AttachRequest(run_id="r", endpoint="h:2"), generation=1)
    leader.publish(AttachRequest(run_id="r", endpoint="h:3"), generation=2)
    newest = other.newest(after=0)
    assert newest is not None
    assert (newest[0], newest[1].endpoint) == (2, "h:3")


def _pair(store: Any, root: str = "file:///a") -> tuple[StoreExchange, StoreExchange]:
    """Return the exchanges of two ranks, as two processes would make them."""
    made = []
    before = dict(StoreExchange._made)
    for one in ranks_of(store, 0, 1):
        StoreExchange._made.clear()
        StoreExchange._made.update(before)
        made.append(StoreExchange(one, root=root, job="j"))
    return made[0], made[1]


def test_what_rank_0_was_refused_with_reaches_everybody() -> None:
    """So that no rank waits for one that has given up."""
    leader, other = _pair(HashStore())
    leader.refuse(InvalidRequest("no such bucket", reason=error_pb2.REASON_INVALID_ROOT, hint="make it"), generation=0)
    with pytest.raises(InvalidRequest, match="no such bucket") as caught:
        other.wait(10)
    assert caught.value.hint == "make it"


def test_a_wait_for_rank_0_ends_by_its_deadline() -> None:
    """And holds no lock of the store meanwhile."""
    store = HashStore()
    _, other = _pair(store)
    ended = threading.Event()

    def use_the_store() -> None:
        while not ended.is_set():
            store.set("mine", "1")

    user = threading.Thread(target=use_the_store)
    user.start()
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="rank 0"):
        other.wait(0.2)
    assert time.monotonic() - begin < 5
    ended.set()
    user.join(10)


def test_checkpointers_do_not_read_one_anothers_keys() -> None:
    """Neither of another root, nor of an earlier one of the same root."""
    store = HashStore()
    first, _ = _pair(store)
    first.publish(AttachRequest(run_id="first"), generation=0)
    _, again = _pair(store)
    _, elsewhere = _pair(store, "file:///b")
    assert again.newest(after=-1) is None
    assert elsewhere.newest(after=-1) is None


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", Reason.keys())
def test_every_reason_has_a_class_and_survives_the_wire(name: str) -> None:
    """With all fields; a reason of a newer version gives the base class."""
    made = from_wire(
        error_pb2.Error(
            reason=Reason.Value(name),
            message="what",
            hint="out",
            step=3,
            rank=0,
            node="n",
            object="k",
            phase="begin",
            ranks=[2, 1],
        )
    )
    expected = 0 < Reason.Value(name) < error_pb2.REASON_INTERNAL
    assert (type(made) is not CkptdError) == expected
    back = from_wire(made.to_wire())
    assert type(back) is type(made)
    for field in ("reason", "message", "hint", "step", "rank", "ranks", "key", "node", "phase"):
        assert getattr(back, field) == getattr(made, field)
    assert "what" in str(made)
    assert "hint: out" in str(made)
    unknown = error_pb2.Error(message="x")
    unknown.reason = 999  # type: ignore[assignment]
    assert type(from_wire(unknown)) is CkptdError
    assert from_wire(unknown).reason_name == "REASON_999"


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    """A reader may trust it."""
    assert errors.__doc__ is not None
    for name in errors.__all__:
        if name[0].isupper():
            assert name in errors.__doc__
