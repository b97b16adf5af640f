"""The typed encoding gives back exactly what it took, or refuses it with its key."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import math
import pathlib
import struct
import types
import uuid
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.client.errors import InvalidRequest
from ckptd.client.values import MAX_DEPTH, _array_dtype, decode, encode
from ckptd.protos.snapshot_pb2 import Value


def round_trip(value: Any) -> Any:
    data = encode(value, "x").SerializeToString()
    return decode(Value.FromString(data))


def bits(number: float) -> bytes:
    return struct.pack("<d", number)


def same(a: Any, b: Any) -> bool:
    """Equal in type, value and order, floats bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bits(a) == bits(b)
    if isinstance(a, complex):
        return bits(a.real) == bits(b.real) and bits(a.imag) == bits(b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and bool(a.tobytes() == b.tobytes())
    return bool(a == b)


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=True)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])) | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(nested)
def test_any_nested_value_comes_back_equal_in_type_value_and_order(value: Any) -> None:
    """What encode accepts, decode gives back."""
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "number",
    [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        5e-324,
        *(struct.unpack("<d", (0x7FF8000000000000 + n).to_bytes(8, "little"))[0] for n in (0, 1, 0xBEEF)),
    ],
)
def test_floats_keep_every_bit(number: float) -> None:
    """-0.0, subnormals and NaN payloads survive."""
    assert bits(round_trip(number)) == bits(number)
    assert bits(round_trip({number: 1}.popitem()[0])) == bits(number)


@pytest.mark.parametrize(
    "number", [2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**20000, -(2**20000), 255, -256], ids=hex
)
def test_integers_of_any_size(number: int) -> None:
    """Python's integers have no limit here either."""
    assert round_trip(number) == number
    assert round_trip([number, 1]) == [number, 1]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(6, dtype=np.float16)[::-1],
        np.asfortranarray(np.arange(12, dtype=np.complex64).reshape(3, 4)),
        np.array(5, dtype=np.uint64),
        np.zeros((0, 3), dtype=bool),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array(["2020-01-01"], dtype="datetime64[ns]"),
        np.float32(-0.0),
        np.int8(-3),
        np.bool_(True),
        np.str_("word"),
        np.str_("in\0side"),
        np.str_(""),
        np.bytes_(b""),
        np.array(["", "a\0"]),
        np.array("x\0"),
        np.array([b"a\0\0"]),
        np.longdouble(1) / 3,
        np.clongdouble(complex(1, -0.0)),
        np.datetime64("NaT"),
        np.timedelta64(5, "us"),
        np.array([1, "NaT"], dtype=">m8[3s]"),
        np.frombuffer(bytes.fromhex("0100a07f ffffbf7f"), dtype="<f4"),
        np.frombuffer(bytes.fromhex("7f80 0001"), dtype=">f2"),
        np.frombuffer(bytes.fromhex("0100000000 00f07f"), dtype="<f8")[0],
        np.ones((2, 0, 3), dtype="V1").view(np.uint8),
        np.broadcast_to(np.float32(2), (3, 2)),
    ],
)
def test_s074_numpy_arrays_and_scalars_keep_dtype_shape_and_bytes(array: Any) -> None:
    """Also big-endian, reversed, Fortran-ordered, 0-dim and empty ones; and what comes back is writable and apart."""
    back = round_trip(array)
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    if isinstance(back, np.ndarray) and back.size:
        assert back.flags.writeable
        assert not np.shares_memory(back, array)


@pytest.mark.parametrize(
    "value",
    [
        {(10**5000, "a"): 1, ((), (None, True)): 2},
        {True: 1, 2: 3, 0.5: 4, b"b": 5, None: 6, "": 7},
        {math.nan: 1},
        [[], (), {}, "", b"", [()], ([],)],
        [1, True, 0, False],
        [2**63, -1],
        (2**63 - 1, -(2**63)),
        torch.Size([]),
        "\0\u2028\U0010ffff",
        complex(-0.0, math.nan),
    ],
    ids=lambda value: str(type(value)),
)
def test_values_at_the_edges_of_types_stay_themselves(value: Any) -> None:
    """Booleans among integers, long integers in keys, empty containers of every kind."""
    assert same(round_trip(value), value)


def test_a_dtype_that_numpy_alone_does_not_know_is_refused() -> None:
    """Other packages register some: they could be written, and never be read where the package is not there."""
    real = np.dtype(np.float32)
    with (
        pytest.raises(InvalidRequest, match="numpy array of dtype") as caught,
        mock.patch("ckptd.client.values.np.dtype", side_effect=TypeError("data type not understood")),
    ):
        _array_dtype(real, "x/y")
    assert caught.value.key == "x/y"


def test_collections_keep_their_type() -> None:
    """Counter, defaultdict, set, frozenset, torch.Size, dtype and device."""
    counter = collections.Counter("hello")
    assert same(dict(round_trip(counter)), dict(counter))
    assert type(round_trip(counter)) is collections.Counter
    assert type(round_trip(collections.defaultdict(list, {1: [2]}))) is collections.defaultdict
    assert round_trip({1, 2, "a"}) == {1, 2, "a"}
    assert type(round_trip(frozenset({1}))) is frozenset
    assert type(round_trip(torch.Size([1, 2]))) is torch.Size
    assert round_trip(torch.bfloat16) is torch.bfloat16
    assert round_trip(torch.device("cuda:1")) == torch.device("cuda:1")
    assert round_trip(np.dtype("<f4")) == np.dtype("<f4")


def test_equal_sets_have_equal_encodings() -> None:
    """The bytes do not depend on the order a set happens to have."""
    words = [f"word{number}" for number in range(50)]
    assert (
        encode(set(words), "x").SerializeToString()
        == encode(set(words[25:]) | set(words[:25]), "x").SerializeToString()
    )


class _Colour(enum.IntEnum):
    RED = 1


class _Pair(NamedTuple):
    a: int


@dataclasses.dataclass
class _Data:
    a: int


class _Subclass(dict[str, int]):
    pass


class _Text(str):
    __slots__ = ()


class _Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        _Colour.RED,
        _Pair(1),
        pathlib.Path("x"),
        lambda: None,
        collections.deque([1]),
        range(3),
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4")]),
        np.ma.masked_array([1], mask=[True]),
        np.recarray(2, dtype=[("a", "i4")]),
        np.array(["a"], dtype=np.dtypes.StringDType()),
        np.void(b"abc"),
        np.str_("ends in NUL\0"),
        np.bytes_(b"ends in NUL\0"),
        np.dtype("O"),
        np.float32,
        bytearray(b"x"),
        memoryview(b"x"),
        array.array("i", [1]),
        dt.datetime(2020, 1, 1),  # noqa: DTZ001 - the kind is meant
        dt.timedelta(1),
        decimal.Decimal(1),
        fractions.Fraction(1, 2),
        uuid.UUID(int=1),
        slice(1),
        Ellipsis,
        types.SimpleNamespace(a=1),
        types.MappingProxyType({}),
        _Data(1),
        _Subclass(),
        _Text("x"),
        collections.ChainMap(),
        {1, frozenset({_Pair(1)})},
        {frozenset({1}): 2},
        {torch.float32: 1},
        {(1, (2, _Colour.RED)): 1},
        {"\ud800": 1},
        {("\ud800",): 1},
        {_Mute(): 1},
        torch.nn.Linear(1, 1),
        torch.Generator(),
        "\ud800",
        {1.5: 1, np.int64(3): 2},
        {_Colour.RED: 1},
        torch.ones(2),
    ],
)
def test_anything_else_is_refused_with_its_key(value: object) -> None:
    """Nothing is approximated, and nothing is pickled."""
    with pytest.raises(InvalidRequest) as caught:
        encode({"state": [0, {"bad": value}]}, "loader")
    assert caught.value.key.startswith("loader/state/1/bad")
    assert "loader/state/1/bad" in str(caught.value)


def test_depth_is_limited_before_protobufs_own_limit() -> None:
    """The deepest state that is accepted can be read again; one level more is refused, and so is a state in itself."""
    deep: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert round_trip(deep) == deep
    with pytest.raises(InvalidRequest, match="nested deeper"):
        encode([deep], "x")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidRequest, match="contains itself"):
        encode(loop, "x")


def test_tensors_become_references() -> None:
    """A tensor leaf is kept by the caller; the value holds its name."""
    kept: dict[str, object] = {}

    def sink(name: str, leaf: object) -> str:
        kept[name] = leaf
        return name

    tensor = torch.ones(2)
    made = encode({"a/b": [tensor]}, "loader", is_tensor=lambda v: isinstance(v, torch.Tensor), tensor=sink)
    assert list(kept) == ["loader/a%2Fb/0"]
    assert decode(made, tensor=kept.__getitem__)["a/b"][0] is tensor


@pytest.mark.parametrize(
    "hostile",
    [
        Value(),
        Value(tensor="x"),
        Value(torch_dtype="nn.Module"),
        Value(torch_dtype="load"),
    ],
)
def test_s136_hostile_values_run_nothing(hostile: Value) -> None:
    """Bytes that follow no rule raise ValueError; no attribute of torch is called for them."""
    with pytest.raises(ValueError):
        decode(hostile)


def test_what_was_stored_does_not_change_with_the_original() -> None:
    """S019: the encoding is a copy, so later changes of lists, dicts and arrays do not reach it."""
    array = np.zeros(3)
    state: dict[str, Any] = {"list": [1, 2], "array": array}
    made = encode(state, "x")
    state["list"].append(3)
    array += 1
    back = decode(made)
    assert back["list"] == [1, 2]
    assert back["array"].tolist() == [0, 0, 0]
