"""`ckptd diff`: compare two steps by what they hold."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from ckptd.daemon.cli.exit_codes import ExitCode
from ckptd.daemon.cli.progress import bytes_bar
from ckptd.daemon.cli.root import Driver, Json, opened, print_json, print_table
from ckptd.daemon.slabs import SlabReader
from ckptd.daemon.state_diff import ObjectDiff, StateDiff, TensorDiff, diff_steps
from ckptd.daemon.stored_step import StoredStep, dropped_or_corrupt, read_stored_step
from ckptd.daemon.tensors import StoredTensor, TensorKey

_AT_STEP = re.compile(r"(?P<root>.+)@(?P<step>[0-9]{1,12})")


def diff(
    sides: Annotated[
        list[str], typer.Argument(metavar="A B", help="Each ROOT, ROOT@STEP or ROOT STEP; the latest step otherwise.")
    ],
    *,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Say that tensors differ, not how far: reads as little as possible.")
    ] = False,
    no_objects: Annotated[bool, typer.Option("--no-objects", help="Compare tensors alone.")] = False,
    json: Json = False,
    driver: Driver = "auto",
) -> None:
    """Compare two committed steps: tensors by global name, bit by bit and as numbers, across layouts, meshes and jobs.

    Tensors in the same boxes are compared by fingerprints; others, and those that differ, are read and their chunks
    proved. Objects are compared by coordinate. Exits with 0 when all is equal, 9 when anything differs.
    """
    (root_a, step_a), (root_b, step_b) = parse_sides(sides)
    with (
        opened(root_a, driver) as store_a,
        opened(root_b, driver) as store_b,
        dropped_or_corrupt(store_a, step_a),
        dropped_or_corrupt(store_b, step_b),
        bytes_bar("compared") as progress,
    ):
        a, b = read_stored_step(store_a, step_a), read_stored_step(store_b, step_b)
        found = diff_steps(
            (a, SlabReader(store_a, a)),
            (b, SlabReader(store_b, b)),
            values=not bitwise,
            objects=not no_objects,
            progress=progress,
        )
    if json:
        print_json(_as_json((root_a, a), (root_b, b), found))
    else:
        _print(found)
    raise typer.Exit(ExitCode.GOOD if found.is_equal else ExitCode.DIFFERENT)


def parse_sides(words: list[str]) -> list[tuple[str, int | None]]:
    """Return the two roots, each with the step that stands behind it.

    Raises:
        BadParameter: there are not two, or a step is named twice.
    """
    sides: list[tuple[str, int | None]] = []
    for word in words:
        if re.fullmatch(r"[0-9]{1,12}", word):
            if not sides or sides[-1][1] is not None:
                raise typer.BadParameter(f"step {word} stands behind no root (a folder of that name is ./{word})")
            sides[-1] = (sides[-1][0], int(word))
        elif match := _AT_STEP.fullmatch(word):
            sides.append((match["root"], int(match["step"])))
        else:
            sides.append((word, None))
    if len(sides) != 2:
        raise typer.BadParameter(f"two steps are compared, {len(sides)} are named: ROOT@STEP ROOT@STEP")
    return sides


def _print(found: StateDiff) -> None:
    tensors, objects = len(found.tensors), len(found.objects)
    typer.echo(
        f"{'equal' if found.is_equal else 'different'}: {found.equal_tensors} of {found.equal_tensors + tensors} tensors "
        f"and {found.equal_objects} of {found.equal_objects + objects} objects are equal"
    )
    if found.is_equal:
        return
    rows = [_tensor_row(each) for each in found.tensors]
    rows += [[str(each.key), f"object: {each.what}", *[""] * 5] for each in found.objects]
    print_table(["name", "differs", "a", "b", "elements", "max abs", "max rel"], rows)


def _tensor_row(each: TensorDiff) -> list[str]:
    row = [str(each.key), str(each.what), _text(each.a), _text(each.b)]
    if (values := each.values) is None:
        return [*row, "", "", ""]
    count = f"{values.different} of {values.elements}"
    if values.nan_on_one_side:
        count += f", {values.nan_on_one_side} NaN on one side"
    return [*row, count, *("" if far is None else f"{far:.6g}" for far in (values.max_abs, values.max_rel))]


def _text(tensor: StoredTensor | None) -> str:
    return "" if tensor is None else f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _as_json(a: tuple[str, StoredStep], b: tuple[str, StoredStep], found: StateDiff) -> dict[str, object]:
    sides = [
        {"root": root, "job": step.job.job, "step": step.id.step, "timeline": str(step.id.timeline)}
        for root, step in (a, b)
    ]
    return {
        "a": sides[0],
        "b": sides[1],
        "equal": found.is_equal,
        "equal_tensors": found.equal_tensors,
        "equal_objects": found.equal_objects,
        "read_tensors": found.read_tensors,
        "tensors": [_tensor_json(each) for each in found.tensors],
        "objects": [_object_json(each) for each in found.objects],
    }


def _tensor_json(each: TensorDiff) -> dict[str, object]:
    shown = _named(each.key) | {"differs": str(each.what)}
    for side, tensor in (("a", each.a), ("b", each.b)):
        if tensor is not None:
            shown[side] = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    if (values := each.values) is not None:
        shown |= {
            "elements": values.elements,
            "different": values.different,
            "max_abs": _number(values.max_abs),
            "max_rel": _number(values.max_rel),
            "nan_on_one_side": values.nan_on_one_side,
        }
    return shown


def _object_json(each: ObjectDiff) -> dict[str, object]:
    return _named(each.key) | {"differs": str(each.what)}


def _named(key: TensorKey) -> dict[str, object]:
    return {"name": key.name} | ({"coordinate": dict(key.coordinate)} if key.coordinate else {})


def _number(value: float | None) -> float | str | None:
    """Return a number as JSON can hold it: infinity is no number there."""
    return "inf" if value == float("inf") else value
