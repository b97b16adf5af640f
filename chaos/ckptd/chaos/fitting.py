"""Whether a scenario makes sense for a cluster, a store and a network; it is asked before anything starts.

Owns: putting the questions together, so that each way in asks all of them: a scenario, a preset, a schedule of a soak, the pytest
plugin. Does not own: the answers (`schedule`, `cluster.means`, `network.way`). What this machine cannot do is another
question (`trial.require_here`): such a scenario is right, and not run.
"""

from __future__ import annotations

from ckptd.chaos.cluster.means import require_means
from ckptd.chaos.network.way import require_sense
from ckptd.chaos.scenario import Scenario
from ckptd.chaos.schedule import PlannedFault, ScheduleError, schedule


def fitted(
    scenario: Scenario, *, nnodes: int, nproc: int, store: str, network: str = "auto", seed: int = 0
) -> tuple[PlannedFault, ...]:
    """Return a scenario's faults, their victims chosen.

    Args:
        scenario: What is done.
        nnodes: Nodes.
        nproc: Ranks on each.
        store: "local" or "s3".
        network: How the network is hurt: "auto" or one of WAYS.
        seed: Decides what the scenario leaves open.

    Raises:
        ScheduleError: The scenario does not fit the number of nodes and ranks, the store, or the network.
    """
    faults = schedule(scenario, nnodes=nnodes, nproc=nproc, seed=seed)
    if store != "s3" and any(fault.store is not None for fault in faults):
        raise ScheduleError(f"scenario {scenario.name} makes an S3 store fail; say --store s3")
    try:
        require_means(faults, store=store)
        require_sense(network, faults, has_endpoint=store == "s3")
    except ScheduleError as error:
        raise ScheduleError(f"scenario {scenario.name}: {error}") from None
    return faults
