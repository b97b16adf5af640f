"""How rank 0 makes its agent the coordinator of a run.

Owns: the run's id and credentials, and the settings that travel with a run. Does not own: telling the other ranks.
Invariant: one `Leader` leads one run, however often its agent is restarted.
"""

from __future__ import annotations

import datetime as dt
import secrets

import grpc

from ckptd.protos.agent_pb2 import AttachRequest, LeadReply, LeadRequest, RunCredentials, RunOptions
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import Retention

from .channel import AgentChannel, error_of
from .config import Config
from .credentials import make_credentials
from .mesh import Topology


def run_options(config: Config) -> RunOptions:
    """Return the settings that travel with a run."""
    return RunOptions(
        retention=Retention(keep_last=config.keep_last, keep_every=config.keep_every),
        takeover=config.takeover,
        read_only=config.read_only,
        attach_timeout_s=config.attach_timeout_s,
        begin_timeout_s=config.begin_timeout_s,
        commit_timeout_s=config.commit_timeout_s,
        restore_timeout_s=config.restore_timeout_s,
        wait_when_busy=config.wait_when_busy,
        slots=config.slots,
        posthumous_timeout_s=config.posthumous_timeout_s,
        store_driver=config.store_driver,
        verify_replicas=config.verify_replicas,
    )


class Leader:
    """Rank 0's part in starting a run."""

    def __init__(self, config: Config, topology: Topology) -> None:
        self._config = config
        self._topology = topology
        self._run_id = ""
        self._credentials = RunCredentials()

    def lead(self, channel: AgentChannel, *, timeline: str) -> AttachRequest:
        """Make the agent the run's coordinator and return what the other ranks must know: run, endpoint, credentials.

        Args:
            channel: To the agent.
            timeline: The run's, "" where it has none yet.

        Raises:
            CkptdError: the agent refused (root, job), or cannot be reached.
        """
        if not self._run_id:
            self._credentials = make_credentials(dt.datetime.now(dt.UTC))
            self._run_id = secrets.token_hex(16)
        request = LeadRequest(
            root=self._config.root,
            job=self._config.job,
            run_id=self._run_id,
            world=self._topology.world,
            mesh=self._topology.to_wire(),
            credentials=self._credentials,
            options=run_options(self._config),
            timeline=timeline,
        )
        failpoint("client.before_Lead")
        try:
            reply: LeadReply = channel.stub.Lead(request, timeout=self._config.attach_timeout_s)
        except grpc.RpcError as failure:
            raise error_of(failure, phase="register") from failure
        failpoint("client.after_Lead")
        return AttachRequest(
            run_id=self._run_id,
            endpoint=self._config.coordinator or reply.endpoint,
            # The key stays with the leading agent.
            credentials=RunCredentials(certificate=self._credentials.certificate, token=self._credentials.token),
        )
