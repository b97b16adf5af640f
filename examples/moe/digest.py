"""SHA-256 of everything that a restore must bring back, from the live objects, with nothing of ckptd in it.

Names: `model/<fqn>` (parameters and buffers, this rank's part), `optim/<fqn>/<state>`, `optim/groups`,
`scheduler`, `loader`, `rng/python`, `rng/numpy`, `rng/torch`.
"""

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def of_tensor(tensor: torch.Tensor) -> str:
    """Digest of dtype, shape and raw bytes of the part of a tensor in this process."""
    local = _local(tensor)
    sha = hashlib.sha256(f"{local.dtype} {tuple(local.shape)} ".encode())
    # Flat first: a tensor of no dimensions cannot be viewed as bytes.
    sha.update(local.contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def of_object(value: Any) -> str:
    """Digest of a nest of plain Python values; floats by their exact bits, anything unknown is an error."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    # Each kind is marked, so that 1, 1.0, True and "1" differ, and so do a list and a tuple.
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return {"np": [value.dtype.str, value.tobytes().hex()]}
        case int():
            return {"int": str(value)}
        case float():
            return {"float": value.hex()}
        case bytes():
            return {"bytes": value.hex()}
        case torch.Tensor():
            return {"tensor": of_tensor(value)}
        case np.ndarray():
            return {"array": [value.dtype.str, value.shape, value.tobytes().hex()]}
        case list():
            return {"list": [_plain(v) for v in value]}
        case tuple():
            return {"tuple": [_plain(v) for v in value]}
        case dict():
            # Sorted: the order of keys is no state, and optimizers change it when they load theirs.
            return {"dict": sorted(([_plain(k), _plain(v)] for k, v in value.items()), key=json.dumps)}
    raise TypeError(f"no digest is defined for {type(value).__qualname__}")


def of_state(model: torch.nn.Module, optimizer: Optimizer, scheduler: Any, loader: Any) -> dict[str, str]:
    """Name to digest for everything that this rank holds."""
    digests = {f"model/{name}": of_tensor(t) for name, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            digests[f"optim/{name}/{key}"] = of_tensor(value) if torch.is_tensor(value) else of_object(value)
    names = {parameter: name for name, parameter in model.named_parameters()}
    digests["optim/groups"] = of_object(
        [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    )
    digests["scheduler"] = of_object(scheduler.state_dict())
    digests["loader"] = of_object(loader.state_dict())
    digests["rng/python"] = of_object(random.getstate())
    digests["rng/numpy"] = of_object(np.random.get_state())  # noqa: NPY002 - the global one is meant
    digests["rng/torch"] = of_tensor(torch.get_rng_state())
    return digests


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append one JSON line in one write; on return it is on disk, whatever happens to this process."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, json.dumps(line).encode() + b"\n")
        os.fsync(handle)
    finally:
        os.close(handle)


@torch.no_grad()
def flip_bit(model: torch.nn.Module, name: str) -> bool:
    """Flip the lowest bit of the first element of `model/<name>`, if this process has one.

    A judge of digests that cannot say no proves nothing; this is what it has to see.
    """
    tensor = model.state_dict().get(name)
    if tensor is None:
        return False
    local = _local(tensor)
    local.view(-1).view(torch.uint8)[:1] ^= 1
    return local.numel() > 0
