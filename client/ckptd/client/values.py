"""Python values without pickle: the typed encoding of `snapshot.proto`'s `Value`.

Owns: which types can be stored, their encoding, and the way back. Does not own: tensors, which the caller turns into
shards; only their names stand here. Invariant: what `encode` accepts, `decode` gives back equal in type, value and
order, floats bit by bit, and sharing nothing with the original; an array keeps C or Fortran order, others come back in C's.
Everything else is refused with its key: no code ever runs from stored bytes, and nothing is approximated.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from ckptd.protos.snapshot_pb2 import Array, Complex, Integers, Mapping, Sequence, Value

from .errors import InvalidRequest
from .sharding import PerRank
from .tree import component

MAX_DEPTH = 40
"""Nesting levels. A level takes two protobuf messages, and protobuf's parsers stop at 100."""
MAX_ARRAY_BYTES = 1 << 30
"""Bytes of one numpy array; protobuf messages end at 2 GiB, and an object is encoded in memory."""

TensorSink = Callable[[str, object], str]
"""Takes (name, tensor leaf), keeps the tensor as a shard, returns the name it is stored under."""
TensorSource = Callable[[str], object]
"""Takes a stored name, returns the tensor that stands for it."""
LeafTest = Callable[[object], bool]

_MIN_INT, _MAX_INT = -(1 << 63), (1 << 63) - 1
_ARRAY_KINDS = "biufcSUmM"


def _no_tensors(name: str, _leaf: object) -> str:
    raise InvalidRequest(f"{name}: a tensor cannot be stored here", key=name)


def _no_leaf(_value: object) -> bool:
    return False


def encode(value: object, name: str, *, is_tensor: LeafTest = _no_leaf, tensor: TensorSink = _no_tensors) -> Value:
    """Return the typed form of `value`. Reads it once, keeps no reference to it.

    Args:
        value: Nested Python value.
        name: Name of `value`; keys in errors begin with it.
        is_tensor: Says which leaves are tensors.
        tensor: Called for each of them; the value keeps the name it returns.

    Raises:
        InvalidRequest: a type that has no typed form, too deep, or too large; `key` says where.
    """
    made = Value()
    _Encoder(is_tensor, tensor).encode(value, name, made, MAX_DEPTH)
    return made


class _Encoder:
    """One walk over a nested value."""

    def __init__(self, is_tensor: LeafTest, tensor: TensorSink) -> None:
        self._is_tensor = is_tensor
        self._tensor = tensor

    def encode(self, value: Any, name: str, out: Value, depth: int) -> None:
        if depth == 0:
            raise InvalidRequest(
                f"{name}: nested deeper than {MAX_DEPTH} levels",
                hint="a state that contains itself looks like this; otherwise flatten it",
                key=name,
            )
        kind = type(value)
        simple = _SIMPLE.get(kind)
        if simple is not None:
            simple(value, name, out)
        elif kind in (list, tuple):
            self._encode_list(value, name, out, depth)
        elif kind in (set, frozenset):
            self._encode_set(value, name, out, depth)
        elif kind in _MAPPINGS:
            mapping = getattr(out, _MAPPINGS[kind])
            mapping.SetInParent()
            if attributes := attributes_of(value):
                self._encode_attributes(attributes, kind, name, mapping.attributes, depth)
            for key, item in value.items():
                below = f"{name}/{component(key)}"
                _encode_key(key, below, mapping.keys.add())
                self.encode(item, below, mapping.values.add(), depth - 1)
        elif self._is_tensor(value):
            out.tensor = self._tensor(name, value)
        elif kind is PerRank:
            own = _Encoder(self._is_tensor, lambda below, leaf: self._tensor(below, PerRank(leaf)))
            own.encode(value.value, name, out, depth - 1)
        elif isinstance(value, np.generic | np.ndarray):
            _encode_array(value, name, out.array)
        elif isinstance(value, np.dtype):
            out.numpy_dtype = _array_dtype(value, name)
        else:
            raise _refused(value, name)

    def _encode_list(self, value: Any, name: str, out: Value, depth: int) -> None:
        is_list = type(value) is list
        if value and all(type(item) is int and _MIN_INT <= item <= _MAX_INT for item in value):
            packed = out.integer_list if is_list else out.integer_tuple
            packed.items.extend(value)
            return
        sequence = out.list if is_list else out.tuple
        sequence.SetInParent()
        for position, item in enumerate(value):
            self.encode(item, f"{name}/{position}", sequence.items.add(), depth - 1)

    def _encode_attributes(
        self, attributes: dict[str, object], kind: type, name: str, out: Mapping, depth: int
    ) -> None:
        for key, item in attributes.items():
            below = f"{name}.{key}"
            if type(key) is not str or hasattr(kind, key):
                raise InvalidRequest(
                    f"{below}: an attribute of a {kind.__qualname__} that hides one of its type cannot be stored",
                    hint="call it otherwise, or keep it in a dict beside",
                    key=below,
                )
            _encode_text(key, below, out.keys.add())
            try:
                # Two levels less: an attribute takes one message more than an item.
                _Encoder(self._is_tensor, _no_tensors).encode(item, below, out.values.add(), max(0, depth - 2))
            except InvalidRequest as error:
                its = f"attributes of a {kind.__qualname__} are saved with it: delete this one, or keep it in a dict beside"
                error.hint = f"{its}; {error.hint}" if error.hint else its
                raise

    def _encode_set(self, value: Any, name: str, out: Value, depth: int) -> None:
        members = []
        for item in value:
            member = Value()
            _Encoder(_no_leaf, _no_tensors).encode(item, f"{name}/{component(item)}", member, depth - 1)
            members.append(member)
        # In the order of their bytes, so that equal sets have equal encodings.
        members.sort(key=lambda member: member.SerializeToString(deterministic=True))
        target = out.set if type(value) is set else out.frozenset
        target.CopyFrom(Sequence(items=members))


def attributes_of(value: object) -> dict[str, Any]:
    """Return what was put on a container itself, by name; not what Python notes there of `OrderedDict[str, int]()`."""
    found = getattr(value, "__dict__", None)
    return {key: item for key, item in found.items() if key != "__orig_class__"} if found else {}


def _refused(value: object, name: str) -> InvalidRequest:
    kind = type(value)
    return InvalidRequest(
        f"{name}: a value of type {kind.__module__}.{kind.__qualname__} cannot be stored",
        hint="store None, bool, int, float, complex, str, bytes, list, tuple, dict, set, numpy arrays, tensors; "
        "turn anything else into these (nothing is pickled)",
        key=name,
    )


def _encode_integer(value: int, _name: str, out: Value) -> None:
    if _MIN_INT <= value <= _MAX_INT:
        out.integer = value
    else:
        out.big_integer = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _float_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def _encode_text(value: str, name: str, out: Value) -> None:
    try:
        out.text = value
    except (UnicodeEncodeError, ValueError):
        raise InvalidRequest(f"{name}: text with lone surrogates cannot be stored", key=name) from None


def _encode_none(_value: None, _name: str, out: Value) -> None:
    out.none = True


def _encode_boolean(value: bool, _name: str, out: Value) -> None:
    out.boolean = value


def _encode_float(value: float, _name: str, out: Value) -> None:
    out.float_bits = _float_bits(value)


def _encode_complex(value: complex, _name: str, out: Value) -> None:
    out.complex.CopyFrom(Complex(real_bits=_float_bits(value.real), imag_bits=_float_bits(value.imag)))


def _encode_blob(value: bytes, _name: str, out: Value) -> None:
    out.blob = value


def _encode_torch_dtype(value: torch.dtype, _name: str, out: Value) -> None:
    out.torch_dtype = str(value).removeprefix("torch.")


def _encode_torch_device(value: torch.device, _name: str, out: Value) -> None:
    out.torch_device = str(value)


def _encode_size(value: torch.Size, _name: str, out: Value) -> None:
    out.size.CopyFrom(Integers(items=value))


def _encode_ready(value: Value, _name: str, out: Value) -> None:
    # A part the caller has encoded before and kept, because it does not change from save to save.
    out.CopyFrom(value)


_SIMPLE: dict[type, Callable[[Any, str, Value], None]] = {
    type(None): _encode_none,
    bool: _encode_boolean,
    int: _encode_integer,
    float: _encode_float,
    complex: _encode_complex,
    str: _encode_text,
    bytes: _encode_blob,
    torch.dtype: _encode_torch_dtype,
    torch.device: _encode_torch_device,
    torch.Size: _encode_size,
    Value: _encode_ready,
}
_MAPPINGS: dict[type, str] = {
    dict: "mapping",
    collections.OrderedDict: "ordered_mapping",
    collections.Counter: "counter",
    collections.defaultdict: "default_mapping",
}


def _encode_key(key: object, name: str, out: Value) -> None:
    if type(key) is tuple:
        out.tuple.SetInParent()
        for part in key:
            _encode_key(part, name, out.tuple.items.add())
    elif type(key) in (type(None), bool, int, float, str, bytes):
        _SIMPLE[type(key)](key, name, out)
    else:
        raise InvalidRequest(
            f"{name}: a dict key of type {type(key).__qualname__} cannot be stored",
            hint="use None, bool, int, float, str, bytes, or tuples of them",
            key=name,
        )


def _is_known(dtype: np.dtype[Any]) -> bool:
    try:
        return np.dtype(dtype.str) == dtype  # types of other packages have names that numpy alone does not know
    except TypeError:
        return False


def _array_dtype(dtype: np.dtype[Any], name: str) -> str:
    if dtype.kind not in _ARRAY_KINDS or dtype.hasobject or dtype.subdtype is not None or not _is_known(dtype):
        raise InvalidRequest(
            f"{name}: a numpy array of dtype {dtype} cannot be stored",
            hint="use a bool, number, fixed-width text or bytes, or time dtype",
            key=name,
        )
    return dtype.str


def _encode_array(value: np.ndarray[Any, Any] | np.generic, name: str, out: Array) -> None:
    scalar = isinstance(value, np.generic)
    if not scalar and type(value) is not np.ndarray:
        raise _refused(value, name)
    out.dtype = _array_dtype(value.dtype, name)
    if value.nbytes > MAX_ARRAY_BYTES:
        raise InvalidRequest(
            f"{name}: a numpy array of {value.nbytes} bytes is larger than {MAX_ARRAY_BYTES}",
            hint="track it as a tensor: torch.from_numpy(array)",
            key=name,
        )
    if scalar and value.dtype.kind in "SU" and len(value) != len(np.array(value)[()]):  # type: ignore[arg-type]
        # Numpy takes such zeros for padding, so the scalar would come back without them.
        raise InvalidRequest(
            f"{name}: a numpy text or bytes scalar that ends in NUL cannot be stored",
            hint="store it as str or bytes",
            key=name,
        )
    out.shape.extend(value.shape)
    out.scalar = scalar
    out.data = value.tobytes()
    # The order decides in which one numpy adds up, and so about the last bits of a sum.
    out.fortran = not scalar and value.flags.fnc


def _no_source(name: str) -> object:
    raise ValueError(f"a tensor {name!r} is referred to where none can stand")


def decode(value: Value, *, tensor: TensorSource = _no_source) -> Any:
    """Return the Python value. Shares no memory with `value`; arrays are writable.

    Raises:
        ValueError: `value` does not follow the format (damaged or hostile bytes).
    """
    kind = value.WhichOneof("kind")
    if kind is None:
        raise ValueError("a stored value has no kind, or one that this version does not know")
    if kind == "tensor":
        return tensor(value.tensor)
    handler = _DECODERS.get(kind)
    if handler is not None:
        return handler(getattr(value, kind))
    if kind in _SEQUENCE_TYPES:
        return _SEQUENCE_TYPES[kind]([decode(item, tensor=tensor) for item in getattr(value, kind).items])
    return _decode_mapping(kind, getattr(value, kind), tensor)


def _decode_mapping(kind: str, mapping: Mapping, tensor: TensorSource) -> Any:
    if len(mapping.keys) != len(mapping.values):
        raise ValueError("a stored mapping has not as many keys as values")
    pairs = [(decode(key), decode(item, tensor=tensor)) for key, item in zip(mapping.keys, mapping.values, strict=True)]
    plain = dict(pairs)
    if kind in _WITH_ATTRIBUTES:
        made = _WITH_ATTRIBUTES[kind](plain)
        vars(made).update(_decode_attributes(mapping.attributes, type(made)))
        return made
    if kind == "default_mapping":
        return collections.defaultdict(None, plain)
    return plain


_WITH_ATTRIBUTES: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "ordered_mapping": collections.OrderedDict,
    "counter": collections.Counter,
}


def _decode_attributes(attributes: Mapping, kind: type) -> dict[str, Any]:
    found = _decode_mapping("mapping", attributes, _no_source)
    if wrong := [key for key in found if not isinstance(key, str) or hasattr(kind, key)]:
        raise ValueError(f"a stored {kind.__qualname__} has the attribute {wrong[0]!r}, which is never written")
    return dict(found)


def _decode_array(array: Array) -> Any:
    dtype = np.dtype(array.dtype)
    if dtype.kind not in _ARRAY_KINDS or dtype.hasobject:
        raise ValueError(f"a stored array has the dtype {array.dtype!r}, which is never written")
    order: Literal["F", "C"] = "F" if array.fortran else "C"
    made: np.ndarray[Any, Any] = np.ndarray(tuple(array.shape), dtype, array.data).copy(order)
    return made[()] if array.scalar else made


def _decode_float(bits: int) -> float:
    found: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return found


def _decode_torch_dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a stored torch dtype {text!r} is not known to torch {torch.__version__}")  # noqa: TRY004
    return found


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "boolean": bool,
    "integer": int,
    "big_integer": lambda data: int.from_bytes(data, "little", signed=True),
    "float_bits": _decode_float,
    "text": str,
    "blob": bytes,
    "array": _decode_array,
    "torch_dtype": _decode_torch_dtype,
    "torch_device": torch.device,
    "integer_list": lambda integers: list(integers.items),
    "integer_tuple": lambda integers: tuple(integers.items),
    "complex": lambda parts: complex(_decode_float(parts.real_bits), _decode_float(parts.imag_bits)),
    "numpy_dtype": np.dtype,
    "size": lambda integers: torch.Size(integers.items),
}
_SEQUENCE_TYPES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
