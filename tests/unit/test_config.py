"""Settings: the later source wins and is named; what is wrong is refused with key, value, source and range."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.daemon.config import AgentConfig, load_config, printed
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.serve import check_listen
from ckptd.protos import error_pb2

KEYS = list(AgentConfig.model_fields)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
paths = texts.map(lambda text: Path("/") / text)
values: dict[str, st.SearchStrategy[Any]] = {
    "run_dir": paths,
    "data_dir": paths,
    "shm_dir": paths,
    "listen": texts,
    "port": st.integers(0, 65535),
    "advertise": texts,
    "insecure": st.booleans(),
    "event_log": paths,
    "roots": st.lists(texts.filter(lambda text: bool(text.strip("/"))), min_size=1, max_size=3).map(tuple),
    "hash_threads": st.integers(1, 64),
    "put_concurrency": st.integers(0, 256),
    "verify_puts": st.booleans(),
    "restore_window_bytes": st.integers(128 << 20, 1 << 40),
    "store_deadline_s": st.floats(0.001, 604800),
    "node_grace_s": st.floats(0.001, 604800),
    "reattach_s": st.floats(0.001, 604800),
    "drain_s": st.floats(0, 86400),
    "idle_exit_s": st.floats(0, 604800),
}


def wrong(flags: dict[str, Any] | None = None, **more: Any) -> str:
    """Load what must be refused; returns the message."""
    with pytest.raises(DaemonError) as caught:
        load_config(flags or {}, **{"environment": {}, **more})
    assert caught.value.error.reason == error_pb2.REASON_INVALID_ARGUMENT
    return str(caught.value)


def written(folder: Path, text: str) -> Path:
    """Write a configuration file."""
    path = folder / "agent.toml"
    path.write_text(text)
    return path


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    """Each value comes from the last source that gives it, and `--print-config` says from which."""
    file = written(tmp_path, "port = 1\nhash_threads = 1\ndrain_s = 1\n")
    variables = {"CKPTD_PORT": "2", "CKPTD_HASH_THREADS": "2", "CKPTD_ADVERTISE": "", "PORT": "9", "CKPTD_ROOT": "x"}
    config, origins = load_config({"port": 3, "listen": None, "roots": ()}, file=file, environment=variables)
    assert (config.port, config.hash_threads, config.drain_s, config.listen) == (3, 2, 1.0, "127.0.0.1")
    assert list(origins) == KEYS
    assert {key: origins[key] for key in ("port", "hash_threads", "drain_s", "listen", "advertise")} == {
        "port": "--port",
        "hash_threads": "CKPTD_HASH_THREADS",
        "drain_s": str(file),
        "listen": "default",
        "advertise": "default",
    }


@given(data=st.data(), keys=st.sets(st.sampled_from(KEYS)))
def test_what_is_printed_loads_as_the_same_settings(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, keys: set[str]
) -> None:
    """The printed settings are a configuration file that gives these settings, whatever text stands in them."""
    given_values = {key: data.draw(values[key], label=key) for key in sorted(keys)}
    config, origins = load_config(given_values, environment={})
    text = printed(config, origins)
    again, from_file = load_config({}, file=written(tmp_path_factory.mktemp("c"), text), environment={})
    assert again == config
    assert all(from_file[key] != "default" for key in keys)


def test_every_printed_setting_says_its_origin_and_meaning() -> None:
    """For every key there is one comment with its description and its source, and all have been given a meaning."""
    config, origins = load_config({"port": 7}, environment={"CKPTD_DRAIN_S": "3"})
    lines = printed(config, origins).splitlines()
    assert len(lines) == 2 * len(KEYS)
    for key, comment, line in zip(KEYS, lines[::2], lines[1::2], strict=True):
        description = AgentConfig.model_fields[key].description
        assert description
        assert comment == f"# {description}  [{origins[key]}]"
        assert line.removeprefix("# ").startswith(f"{key} = ")
    assert tomllib.loads("\n".join(lines))["port"] == 7


@pytest.mark.parametrize("key", sorted(values))
def test_every_setting_can_be_given_by_its_variable(key: str) -> None:
    """CKPTD_<KEY> sets the key, and its text is taken as the file's value would be."""
    own = {"roots": "file:///a,s3://b/c", "insecure": "true", "verify_puts": "false", "listen": "::1"}
    text = {**own, "restore_window_bytes": str(1 << 30)}.get(
        key, "5" if AgentConfig.model_fields[key].annotation in {int, float} or key.endswith("_s") else "/x"
    )
    config, origins = load_config({}, environment={f"CKPTD_{key.upper()}": text})
    assert origins[key] == f"CKPTD_{key.upper()}"
    expected: Any = {"roots": ("file:///a", "s3://b/c"), "insecure": True, "verify_puts": False}.get(key)
    assert getattr(config, key) == expected if expected is not None else str(getattr(config, key)).startswith(text)


def test_all_unknown_keys_and_bad_values_are_named_in_one_error(tmp_path: Path) -> None:
    """One error lists every wrong key with its value and where it came from."""
    file = written(tmp_path, 'prot = 1\ndrain_s = -1\n[section]\nport = "x"\n')
    message = wrong({"port": 70000}, file=file, environment={"CKPTD_HASH_THREADS": "many"})
    for part in (
        f"prot = 1 (from {file}): unknown key",
        f"section = {{'port': 'x'}} (from {file}): unknown key",
        f"drain_s = -1 (from {file}): Input should be greater than or equal to 0 (allowed: at least 0, at most 86400)",
        "port = 70000 (from --port): Input should be less than or equal to 65535 (allowed: at least 0, at most 65535)",
        "hash_threads = 'many' (from CKPTD_HASH_THREADS): Input should be a valid integer",
        "(allowed: at least 1, at most 64)",
        "--print-config",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("port", "-1"),
        ("port", "65536"),
        ("port", "1.5"),
        ("hash_threads", "0"),
        ("hash_threads", "65"),
        ("put_concurrency", "257"),
        ("put_concurrency", "-1"),
        ("restore_window_bytes", "1024"),
        ("store_deadline_s", "0"),
        ("store_deadline_s", "nan"),
        ("node_grace_s", "inf"),
        ("reattach_s", "604801"),
        ("drain_s", "nan"),
        ("idle_exit_s", "-0.1"),
        ("insecure", "perhaps"),
        ("run_dir", "relative/folder"),
        ("shm_dir", "~/shm"),
        ("roots", "file:///a,"),
        ("roots", "/"),
    ],
)
def test_s069_a_value_out_of_range_is_refused_with_key_value_and_range(key: str, text: str) -> None:
    """The message leads with `key = value (from VARIABLE)`; numbers come with the whole range."""
    message = wrong(environment={f"CKPTD_{key.upper()}": text})
    assert message.startswith(f"{key} = ")
    assert f"(from CKPTD_{key.upper()})" in message
    is_number = key not in {"insecure", "run_dir", "shm_dir", "roots"}
    assert ("(allowed: " in message) == is_number


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, a folder, no TOML, no text: each names the file and what is wrong."""
    assert f"{tmp_path}/none.toml cannot be read: No such file" in wrong(file=tmp_path / "none.toml")
    assert "cannot be read: Is a directory" in wrong(file=tmp_path)
    assert "is not TOML" in wrong(file=written(tmp_path, "port 1"))
    binary = tmp_path / "agent.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not TOML" in wrong(file=binary)


def test_an_empty_address_is_not_taken_for_every_interface() -> None:
    """An empty variable is as good as none; an empty flag is an error."""
    assert load_config({}, environment={"CKPTD_LISTEN": ""})[0].listen == "127.0.0.1"
    assert "listen = '' (from --listen)" in wrong({"listen": ""})


def test_settings_cannot_be_changed() -> None:
    """Settings are data: what was printed is what counts."""
    config, _ = load_config({}, environment={})
    with pytest.raises(ValueError, match="frozen"):
        config.port = 1


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "[::]", "0", "0.0", "::0", "*", "::ffff:0.0.0.0"])  # noqa: S104
def test_listening_on_every_interface_must_be_meant(address: str) -> None:
    """Every spelling of "all interfaces" is refused without --insecure, and allowed with it."""
    config, _ = load_config({"listen": address}, environment={})
    with pytest.raises(DaemonError, match=r"every interface.*--insecure") as caught:
        check_listen(config)
    assert caught.value.error.reason == error_pb2.REASON_NOT_ALLOWED
    check_listen(load_config({"listen": address, "insecure": True}, environment={})[0])


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "[::1]", "localhost", "192.0.2.7"])
def test_one_interface_needs_no_permission(address: str) -> None:
    """An address that names one interface is taken."""
    check_listen(load_config({"listen": address}, environment={})[0])


@pytest.mark.parametrize("address", ["no such host", "127.0.0.1:80", "[::1"])
def test_what_is_no_address_is_refused_at_start(address: str) -> None:
    """A name that does not resolve, or comes with a port, is an error of the start and not of the first run."""
    with pytest.raises(DaemonError, match=r"listen = .*address") as caught:
        check_listen(load_config({"listen": address}, environment={})[0])
    assert caught.value.error.reason == error_pb2.REASON_INVALID_ARGUMENT
