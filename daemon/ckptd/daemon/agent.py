"""The agent of one node: the registry of its jobs, runs, sessions and coordinators.

Owns: which jobs are open, adopting what a dead agent left, who leads, when an idle agent ends. Does not own: the RPCs
(`agent_service`), how a root is opened (`job_root`), its files (`node_files`), a job's slots (`held`), a run's
link (`run_link`). All state lives on one asyncio loop; blocking work goes to threads.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import secrets
from concurrent.futures import ThreadPoolExecutor

from ckptd.daemon.config import AgentConfig
from ckptd.daemon.errors import DaemonError
from ckptd.daemon.held import HeldJob, job_digest
from ckptd.daemon.job_root import check_root, open_root
from ckptd.daemon.node_files import node_id, port_file, read_port
from ckptd.daemon.orphans import free_orphans
from ckptd.daemon.request_checks import check_attach, check_job_name, check_lead
from ckptd.daemon.run_link import RunLink
from ckptd.daemon.runner import CoordinatorRunner
from ckptd.daemon.session import Session
from ckptd.daemon.shared_files import prepare_folder
from ckptd.daemon.snapshots import Snapshot
from ckptd.daemon.supervisor import ProcessWatch
from ckptd.daemon.telemetry import EventLog
from ckptd.daemon.uploader import Uploader
from ckptd.protos import error_pb2
from ckptd.protos.agent_pb2 import AttachRequest, Event, LeadRequest
from ckptd.protos.failpoints import failpoint
from ckptd.protos.snapshot_pb2 import HeldSnapshot
from ckptd.storage_backends.base import ObjectStore


class Agent:
    """One agent process. Make it and use it on the event loop."""

    def __init__(self, config: AgentConfig, log: EventLog) -> None:
        self.config = config
        self.log = log
        for folder in (config.run_dir, config.data_dir, config.shm_dir):
            prepare_folder(folder)
        self.node = node_id(config.data_dir)
        self.incarnation = secrets.token_hex(8)
        self.threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="ckptd")
        self.jobs: dict[str, HeldJob] = {}
        self.runs: dict[str, RunLink] = {}
        self.sessions: dict[str, Session] = {}
        self.coordinators: dict[str, CoordinatorRunner] = {}
        self._untried: set[str] = set()
        """Jobs whose store was opened for reading only, and has not been probed."""
        self.probe_token = secrets.token_bytes(16)
        self.probe_path = config.shm_dir / f"probe-{self.node}"
        self.probe_path.touch(mode=0o600)
        self.probe_path.write_bytes(self.probe_token)
        self._opening: dict[str, asyncio.Lock] = {}
        self._idle_since = asyncio.get_running_loop().time()

    # ------------------------------------------------------------ jobs

    async def adopt(self) -> None:
        """Finish what an agent before this one left staged in shared memory; give back what cannot be, a little later."""
        loop = asyncio.get_running_loop()
        # Not at once: ranks that live come back within this time, and find their slots warm.
        loop.call_later(self.config.reattach_s, lambda: loop.create_task(self._free_orphans()))
        roots: dict[tuple[str, str], str] = {}
        for path in sorted(self.config.shm_dir.glob("*.snapshot.*.pb")):
            try:
                about = HeldSnapshot.FromString(path.read_bytes())
            except (OSError, ValueError):
                path.unlink(missing_ok=True)
                continue
            roots[(about.root, about.job)] = about.store_driver
        for (root, job), driver in roots.items():
            try:
                await self.job(root, job, driver)
            except DaemonError as failure:
                self.log.emit("not_adopted", job=job, node=self.node, error=str(failure))

    async def _free_orphans(self) -> None:
        """Give back the shared memory of jobs that nobody came back to, but for what is staged."""
        count = nbytes = 0
        running = {(link.about.root, link.about.job) for link in self.runs.values()}
        for held in self.jobs.values():
            if (held.root, held.job) not in running:
                freed = held.free_empty()
                count, nbytes = count + freed[0], nbytes + freed[1]
        leave = {held.pool_digest for held in self.jobs.values()}
        free = functools.partial(free_orphans, self.config.shm_dir, leave=leave)
        others = await asyncio.get_running_loop().run_in_executor(self.threads, free)
        if count + others[0]:
            self.log.emit("orphans_freed", node=self.node, files=count + others[0], bytes=nbytes + others[1])

    async def job(self, root: str, job: str, driver: str, *, read_only: bool = False) -> HeldJob:
        """Return the node's part of a job, opening and probing its store at first.

        For reading only it is opened without the probe, which writes; the first run that writes probes it then. A run that
        only reads may leave the job's name empty.

        Raises:
            DaemonError: the root cannot be used, is not allowed here, or the job's name is bad.
        """
        if job or not read_only:
            check_job_name(job)
        check_root(root, self.config.roots)
        digest = job_digest(root, job)
        async with self._opening.setdefault(digest, asyncio.Lock()):
            known = self.jobs.get(digest)
            loop = asyncio.get_running_loop()
            if known is not None:
                if digest in self._untried and not read_only:
                    with await loop.run_in_executor(self.threads, self._open, root, driver, False) as probed:
                        known.store.capabilities = probed.capabilities
                    self._untried.discard(digest)
                return known
            store = await loop.run_in_executor(self.threads, self._open, root, driver, read_only)
            held = HeldJob(
                root=root,
                job=job,
                node=self.node,
                store=store,
                shm_dir=self.config.shm_dir,
                restore_window_bytes=self.config.restore_window_bytes,
                threads=self.threads,
                log=self.log,
                uploader=Uploader(
                    store,
                    events=self.log,
                    hash_threads=self.config.hash_threads,
                    put_threads=self.config.put_concurrency or None,
                    verify_puts=self.config.verify_puts,
                ),
                on_change=self._on_change,
            )
            self.jobs[digest] = held
            if read_only:
                self._untried.add(digest)
            failpoint("agent.before_adopt_slots")
            held.adopt()
            return held

    def _open(self, root: str, driver: str, read_only: bool) -> ObjectStore:
        deadline_s = self.config.store_deadline_s
        return open_root(root, driver or "auto", read_only=read_only, deadline_s=deadline_s, node=self.node)

    def _on_change(self, snapshot: Snapshot) -> None:
        """An upload has ended: every run of the job hears of it (a newer run may adopt it)."""
        about = snapshot.about
        for link in self.runs.values():
            if (link.about.root, link.about.job) == (about.root, about.job):
                link.saves.changed(snapshot)

    # ------------------------------------------------------------ runs

    async def _job_of(self, request: LeadRequest | AttachRequest) -> HeldJob:
        options = request.options
        return await self.job(request.root, request.job, options.store_driver, read_only=options.read_only)

    async def lead(self, request: LeadRequest) -> str:
        """Play the coordinator of a run; returns its endpoint. Idempotent per run.

        Raises:
            DaemonError: the request makes no sense, the root cannot be used, or no port can be had.
        """
        check_lead(request)
        held = await self._job_of(request)
        known = self.coordinators.get(request.run_id)
        if known is not None:
            return known.endpoint
        runner = CoordinatorRunner(
            request,
            held.store,
            threads=self.threads,
            log=self.log,
            versions={"ckptd": importlib.metadata.version("ckptd")},
            on_claimed=self._claimed,
            on_closed=self._coordinator_closed,
            node_grace_s=self.config.node_grace_s,
        )
        self.coordinators[request.run_id] = runner
        try:
            failpoint("agent.before_bind")
            await self._bind(runner, request.run_id)
        except BaseException:
            del self.coordinators[request.run_id]
            raise
        return runner.endpoint

    async def _bind(self, runner: CoordinatorRunner, run_id: str) -> None:
        """Listen where the run's coordinator listened before, if this agent was restarted: the others look for it there."""
        host = self.config.listen
        advertise = self.config.advertise or host
        path = port_file(self.config.run_dir, run_id)
        before = read_port(path)
        for port in dict.fromkeys((before, self.config.port, 0)):
            if port is None:
                continue
            try:
                await runner.start(listen_host=host, advertise_host=advertise, port=port)
            except DaemonError:
                if port == 0 or (port == self.config.port and before is None and not self.coordinators):
                    raise
                continue
            break
        path.write_text(str(runner.port))

    def _claimed(self, runner: CoordinatorRunner) -> None:
        """A run of a job has its claim: coordinators here of runs before it have nothing left to do.

        Not those of runs after it: its claim may come late, its trainers being dead, and they claim above it. Nor those that only
        read: they hold no claim that another one could fence.
        """
        for other in list(self.coordinators.values()):  # in the order in which they were asked to lead
            if other is runner:
                return
            same = (other.lead.root, other.lead.job) == (runner.lead.root, runner.lead.job)
            if same and not other.lead.options.read_only:
                other.supersede()

    def _coordinator_closed(self, runner: CoordinatorRunner) -> None:
        self.coordinators.pop(runner.lead.run_id, None)
        port_file(self.config.run_dir, runner.lead.run_id).unlink(missing_ok=True)
        asyncio.get_running_loop().create_task(_stopped(runner))

    async def attach(self, request: AttachRequest) -> Session:
        """Open a rank's session.

        Raises:
            DaemonError: the root cannot be used, or the request makes no sense.
        """
        check_attach(request)
        held = await self._job_of(request)
        link = self.runs.get(request.run_id)
        if link is None:
            link = RunLink(
                request,
                node=self.node,
                incarnation=self.incarnation,
                held=held,
                log=self.log,
                on_closed=self._run_closed,
            )
            self.runs[request.run_id] = link
        session = Session(token=secrets.token_hex(16), about=request)
        session.tell(Event(attached=Event.Attached(session=session.token)))
        self.sessions[session.token] = session
        link.attach(session)
        session.watch = ProcessWatch(request.pid, lambda: self._lost(session, f"its process {request.pid} ended"))
        return session

    def stream_ended(self, session: Session) -> None:
        """A rank's stream broke: it is dead when its process is, or when it does not come back in time."""
        if not session.attached:
            return
        if session.watch is not None and session.watch.seen:
            session.loss = asyncio.get_running_loop().call_later(
                self.config.reattach_s, self._lost, session, "its connection broke and did not come back"
            )
        else:
            self._lost(session, "its connection broke")

    def detach(self, session: Session) -> None:
        """A rank ends in order."""
        self._gone(session, clean=True, why="detached")

    def _lost(self, session: Session, why: str) -> None:
        self._gone(session, clean=False, why=why)

    def _gone(self, session: Session, *, clean: bool, why: str) -> None:
        link = self.runs.get(session.about.run_id)
        if link is not None:
            link.gone(session, clean=clean, why=why)
        self.sessions.pop(session.token, None)

    def _run_closed(self, link: RunLink) -> None:
        if self.runs.get(link.about.run_id) is link:
            del self.runs[link.about.run_id]
        for session in link.ranks.values():
            self.sessions.pop(session.token, None)

    def session(self, token: str) -> tuple[Session, RunLink]:
        """Return a living session with its run.

        Raises:
            DaemonError: there is no such session (the agent was restarted, or the rank was given up).
        """
        session = self.sessions.get(token)
        link = self.runs.get(session.about.run_id) if session is not None else None
        if session is None or link is None:
            raise DaemonError.of(
                "the session is unknown to this agent: it was restarted, or gave the rank up",
                reason=error_pb2.REASON_UNAVAILABLE,
                hint="attach again",
            )
        return session, link

    # ------------------------------------------------------------ end

    def is_idle(self) -> bool:
        """Whether no rank is attached, nothing is uploaded and no coordinator works."""
        return (
            not self.sessions
            and not self.coordinators
            and not any(job.uploads.is_uploading for job in self.jobs.values())
        )

    def idle_for(self) -> float:
        """Seconds since the agent had something to do."""
        now = asyncio.get_running_loop().time()
        if not self.is_idle():
            self._idle_since = now
        return now - self._idle_since

    async def drain(self, seconds: float) -> bool:
        """Wait for running uploads; True when none is left."""
        deadline = asyncio.get_running_loop().time() + seconds
        while any(job.uploads.is_uploading for job in self.jobs.values()):
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def close(self, *, forget: bool) -> None:
        """End everything; `forget` also deletes the slots (an embedded agent that was idle)."""
        for link in list(self.runs.values()):
            link.close()
        for runner in list(self.coordinators.values()):
            await runner.stop()
        for job in self.jobs.values():
            if forget:
                job.forget()
            job.close()
        self.probe_path.unlink(missing_ok=True)


async def _stopped(runner: CoordinatorRunner) -> None:
    await runner.stop()
