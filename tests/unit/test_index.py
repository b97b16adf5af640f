"""A node's index: any layout comes back as it was, and no damaged byte is believed."""

from __future__ import annotations

import blake3
import numpy as np
import pytest
from fixtures.at_rest import PLAN_DIGEST, Shard, build_node, build_section, make_claim, per_rank, timeline
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon import index
from ckptd.daemon.errors import CorruptError, FormatError
from ckptd.daemon.keys import IndexKey, StepId, parse_key
from ckptd.protos import error_pb2, shard_table
from ckptd.protos.snapshot_pb2 import IndexHeader, Mesh, RankSection, StepRef
from ckptd.storage_backends.memory import MemoryStore

T1 = timeline(1)
OWN = StepId(T1, 7)


def header(*, world: int = 2, base: StepRef | None = None) -> IndexHeader:
    """Return a header without sections."""
    return IndexHeader(
        step=7,
        timeline=str(T1),
        node="n",
        world=world,
        mesh=Mesh(axes=["dp"], sizes=[world]),
        plan_digest=PLAN_DIGEST,
        base=base,
    )


def section(rank: int = 0, **more: object) -> RankSection:
    """Return a section with two shards and an object."""
    shards = [Shard(name="w", values=np.arange(50, dtype="<f4")), per_rank("rng", np.arange(9, dtype="<u2"))]
    made, _ = build_section(rank, [rank], shards, {"loader": b"x" * 70}, OWN, **more)  # type: ignore[arg-type]
    return made


shards_of = st.builds(
    lambda name, shape, dtype, scope: Shard(name=name, values=np.ones(shape, dtype=dtype), scope=scope),
    st.text(min_size=1, max_size=20),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(["<f4", "<i8", "|b1", "<u2"]),
    st.integers(0, 1),
)


@given(
    st.dictionaries(
        st.integers(0, 7),
        st.tuples(st.lists(shards_of, max_size=6), st.dictionaries(st.text(min_size=1), st.binary(), max_size=3)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 300),
)
def test_any_layout_comes_back_and_bytes_are_deterministic(
    ranks: dict[int, tuple[list[Shard], dict[str, bytes]]], chunk_bytes: int
) -> None:
    """What is built is parsed back equal, whatever the ranks' rows and objects; building twice gives equal bytes."""
    sections = [
        build_section(rank, [rank], shards, objects, OWN, chunk_bytes=chunk_bytes)[0]
        for rank, (shards, objects) in ranks.items()
    ]
    data = index.build_index(header(world=8), sections)
    assert data == index.build_index(header(world=8), list(reversed(sections)))
    found, by_rank = index.parse_index(data)
    assert [entry.rank for entry in found.sections] == sorted(ranks)
    assert {one.rank: one for one in sections} == by_rank
    for rank, (shards, objects) in ranks.items():
        refs = index.chunk_refs(by_rank[rank])
        assert [row.name for row in shard_table.iter_rows(by_rank[rank].shards)] == [shard.name for shard in shards]
        ends = [ref.stream_offset + ref.length for ref in refs]
        assert [ref.stream_offset for ref in refs] == [0, *ends][: len(refs)]
        for offset, data_of in zip(by_rank[rank].object_offset, objects.values(), strict=True):
            assert not data_of or offset + len(data_of) <= ends[-1]


def test_the_offsets_settle_around_varint_limits() -> None:
    """The header's length depends on the offsets in it; they fit for every length of names around the limits."""
    for extra in range(0, 300, 7):
        made = header()
        made.tags["x" * extra] = "y"
        data = index.build_index(made, [section(0), section(1)])
        assert set(index.parse_index(data)[1]) == {0, 1}


def test_every_flipped_bit_is_found() -> None:
    """A bit flipped anywhere in an index is refused through its name; and in a section also without the whole file."""
    built = build_node(make_claim(T1, {"n": [0]}), 7, "n", {0: ([Shard(name="w", values=np.arange(9))], {"o": b"1"})})
    entry = index.parse_header(built.index).sections[0]
    for at in range(len(built.index)):
        damaged = bytearray(built.index)
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptError):
            index.load_index(built.ref, bytes(damaged))
        if at >= entry.offset:
            with pytest.raises(FormatError):
                index.parse_section(bytes(damaged[entry.offset :]), entry, header(world=1))


def test_every_shorter_index_is_refused() -> None:
    """An index cut anywhere is CORRUPT, never half read."""
    data = index.build_index(header(), [section(0), section(1)])
    for end in range(0, len(data), 5):
        with pytest.raises(FormatError) as caught:
            index.parse_index(data[:end])
        assert caught.value.error.reason == error_pb2.REASON_CORRUPT


@given(st.binary(max_size=400))
def test_hostile_bytes_end_in_a_format_error(data: bytes) -> None:
    """Arbitrary bytes behind a right magic end in FormatError, in bounded memory."""
    for prefix in (b"", index.MAGIC, index.MAGIC + len(data).to_bytes(8, "little"), index.MAGIC + b"\xff" * 8):
        with pytest.raises(FormatError):
            index.parse_index(prefix + data)


def test_a_newer_format_is_refused_with_both_numbers() -> None:
    """FORMAT_UNSUPPORTED for a newer version, feature, algorithm or encoding; never a guess."""
    data = bytearray(index.build_index(header(), [section()]))
    for change in (
        {"format_version": 2},
        {"required_features": ["sparse"]},
        {"digest_algorithm": "sha3"},
        {"fingerprint_algorithm": "crc"},
    ):
        made = header()
        for name, value in change.items():
            if isinstance(value, list):
                getattr(made, name).extend(value)
            else:
                setattr(made, name, value)
        with pytest.raises(FormatError) as caught:
            index.build_index(made, [section()])
        assert caught.value.error.reason == error_pb2.REASON_FORMAT_UNSUPPORTED
    encoded = section()
    encoded.chunk_encoding.extend([1] * len(encoded.chunk_length))
    made = header()
    made.encodings.extend(["none", "zstd"])
    with pytest.raises(FormatError, match="zstd"):
        index.build_index(made, [encoded])
    assert data


def changed(name: str, value: object) -> RankSection:
    """Return a section with one column changed."""
    made = section()
    column = getattr(made, name)
    if isinstance(column, bytes):
        setattr(made, name, value)
    else:
        del column[:]
        column.extend(value)
    return made


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (changed("writer", [0]), "writer"),
        (changed("writer", [0, 9]), "world of 2"),
        (changed("stream_offset", [0, 10_000]), "ends at byte"),
        (changed("stream_offset", [0, 2**64 - 8]), "ends at byte 18446744073709"),
        (changed("stream_offset", [0, 100]), "share bytes"),
        (changed("object_offset", [2**63]), "ends at byte"),
        (changed("object_offset", [0]), "share bytes"),
        (changed("fingerprints", b"1"), "fingerprints"),
        (changed("chunk_digests", b""), "chunk_digests"),
        (changed("chunk_source", [5, 5, 5]), "table of sources"),
        (changed("chunk_length", [0, 64, 70]), "1 to"),
        (changed("chunk_length", [2**40, 64, 70]), "1 to"),
        (changed("chunk_plain_length", [1, 2, 3]), "plain length"),
        (changed("sources", ["x"]), "not <12-digit step>"),
        (changed("sources", [str(StepId(T1, 3))]), "names no base"),
        (changed("coordinate", [2]), "not on a mesh"),
        (changed("coordinate", []), "coordinate"),
    ],
)
def test_columns_that_do_not_fit_are_refused(bad: RankSection, expected: str) -> None:
    """No column may be short, leave its table, or leave the stream; two rows may not share bytes."""
    assert len(section().chunk_length) == 3
    with pytest.raises(FormatError, match=expected):
        index.build_index(header(), [bad])


def test_a_section_may_say_that_its_replicas_were_left_uncompared() -> None:
    """Only beside the coordinator's word and the feature's name, only with zeros, and only where it has replicas."""
    word = StepRef(step=5, timeline=str(T1))
    shards = [Shard(name="w", values=np.arange(50, dtype="<f4")), Shard(name="v", values=np.arange(9), writer=1)]
    left, _ = build_section(0, [0], shards, {}, OWN, uncompared=True)
    made = header()
    made.compared_in.CopyFrom(word)
    found, sections = index.parse_index(index.build_index(made, [left]))
    assert list(found.required_features) == ["uncompared-replicas"]
    assert (found.compared_in, sections[0].uncompared) == (word, True)
    assert sections[0].fingerprints[16:] == bytes(16)
    with pytest.raises(FormatError, match="its header does not"):
        index.build_index(header(), [left])
    given_anyhow, _ = build_section(0, [0], shards, {}, OWN)
    assert not index.parse_index(index.build_index(made, [given_anyhow]))[0].required_features
    given_anyhow.uncompared = True
    with pytest.raises(FormatError, match="has their fingerprints"):
        index.build_index(made, [given_anyhow])
    none = section()
    none.uncompared = True
    with pytest.raises(FormatError, match="has none"):
        index.build_index(made, [none])
    for bad in (StepRef(step=7, timeline=str(T1)), StepRef(step=5, timeline=str(timeline(2)))):
        made.compared_in.CopyFrom(bad)
        with pytest.raises(FormatError, match="no step before"):
            index.build_index(made, [left])


def test_an_older_reader_refuses_an_index_with_replicas_left_uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the feature's name: zeros are no fingerprints, and it would take them for some."""
    shards = [Shard(name="w", values=np.arange(50, dtype="<f4")), Shard(name="v", values=np.arange(9), writer=1)]
    left, _ = build_section(0, [0], shards, {}, OWN, uncompared=True)
    made = header()
    made.compared_in.CopyFrom(StepRef(step=5, timeline=str(T1)))
    data, always = index.build_index(made, [left]), index.build_index(header(), [section()])
    monkeypatch.setattr("ckptd.daemon.record_checks.KNOWN_FEATURES", frozenset())
    index.parse_index(always)
    with pytest.raises(FormatError, match="uncompared-replicas") as caught:
        index.parse_index(data)
    assert caught.value.error.reason == error_pb2.REASON_FORMAT_UNSUPPORTED


def test_sources_are_the_step_itself_or_not_newer_than_the_base() -> None:
    """A chunk may be referred to only through the base: from it, or from what it refers to."""
    base = StepRef(step=5, timeline=str(T1))
    old = StepId(T1, 3)
    held = {blake3.blake3(np.arange(50, dtype="<f4").tobytes() + bytes(56)).digest(): old}
    assert index.chunk_refs(section(base=held))[0].key.endswith(str(old))
    index.build_index(header(base=base), [section(base=held)])
    newer = dict.fromkeys(held, StepId(T1, 6))
    with pytest.raises(FormatError, match="newer than its base"):
        index.build_index(header(base=base), [section(base=newer)])
    with pytest.raises(FormatError, match="not older"):
        index.build_index(header(base=StepRef(step=7, timeline=str(T1))), [section()])


def test_a_rank_reads_its_own_part() -> None:
    """Header and one section are read with ranged requests, checked, and equal to the whole."""
    store = MemoryStore()
    claim = make_claim(T1, {"n": [0, 1, 2]})
    state: dict[int, tuple[list[Shard], dict[str, bytes]]] = {
        rank: ([per_rank("x" * 30_000, np.arange(9) + rank)], {}) for rank in range(3)
    }
    built = build_node(claim, 7, "n", state)
    built.put(store)
    key = parse_key(built.ref.key)
    assert isinstance(key, IndexKey)
    found = index.read_header(store, key, built.ref.bytes)
    whole_header, sections = index.read_index(store, key)
    assert found == whole_header
    assert index.read_section(store, key, found, 2) == sections[2]
    with pytest.raises(FormatError, match="no section of rank 5"):
        index.read_section(store, key, found, 5)


def test_an_open_index_decodes_what_is_asked_for_after_the_whole_was_compared() -> None:
    """One section equals that of the whole; a flipped bit in another rank's section is found before any is decoded."""
    state: dict[int, tuple[list[Shard], dict[str, bytes]]] = {
        rank: ([per_rank("x", np.arange(9) + rank)], {}) for rank in range(3)
    }
    built = build_node(make_claim(T1, {"n": [0, 1, 2]}), 7, "n", state)
    found = index.open_index(built.ref, built.index)
    assert found.section(1) == index.load_index(built.ref, built.index)[2][1]
    with pytest.raises(FormatError, match="no section of rank 5"):
        found.section(5)
    bad = bytearray(built.index)
    bad[-1] ^= 1
    with pytest.raises(CorruptError, match="digest in its name"):
        index.open_index(built.ref, bytes(bad))
    with pytest.raises(CorruptError, match="is gone"):
        index.open_index(built.ref, None)


def test_an_index_under_another_name_is_refused() -> None:
    """An index copied to another step, timeline or node does not pass for it, though its digest fits the name."""
    built = build_node(make_claim(T1, {"n": [0]}), 7, "n", {0: ([], {"o": b"1"})})
    for other in (IndexKey(StepId(T1, 8), "n", built.ref.blake3), IndexKey(OWN, "m", built.ref.blake3)):
        store = MemoryStore()
        store.put(str(other), built.index)
        with pytest.raises(FormatError, match="it is of step 7"):
            index.read_index(store, other)
