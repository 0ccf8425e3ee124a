"""Run stages on an existing Ray cluster, each as a Prefect task (schedule.runner: ray).

Ray assigns a node's GPUs to its stages; its other limits are the node's own leases, as on a Prefect worker.
"""

import signal
from collections.abc import Callable
from typing import Any, Self

import ray
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from ray.exceptions import RayError

from pipeline import processes
from pipeline.remote import dispatch, dvc_remote
from pipeline.remote.prefect_worker import stage_on_ray
from stages.params.schedule import StageResources

POLL_S = 1.0


class RayCluster:
    """A connection to a Ray cluster, open while it is entered. Ray ends this process's tasks when this process ends."""

    def __init__(self, address: str | None) -> None:
        if address is None:
            raise ValueError(
                "params.yaml: schedule.runner is ray, and schedule.ray_address null; write host:6379, or auto"
            )
        self._address = address
        self._refs: set[Any] = set()

    def __enter__(self) -> Self:
        on_cancel = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(self._address, namespace="prefect", log_to_driver=False)
        except (RayError, ConnectionError) as error:
            raise ValueError(f"no Ray cluster answers at schedule.ray_address {self._address}: {error}") from None
        signal.signal(signal.SIGTERM, on_cancel)  # Ray has replaced the handler
        self._runner = RayTaskRunner(address=self._address).__enter__()  # uses the connection that is open
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._runner.__exit__(*exc_info)
        ray.shutdown()

    def run_order(self, order: dvc_remote.StageOrder, needs: StageResources, log: Callable[[str], object]) -> None:
        """Run a stage on a node. Raises StageError if it failed or the run is cancelled."""
        task = stage_on_ray.with_options(name=order.stage, task_run_name=order.stage)
        # No retries of Ray's: `schedule.attempts` counts them.
        with remote_options(num_cpus=1, num_gpus=_count_node_gpus(needs), max_retries=0):
            future: Any = self._runner.submit(task, {"order": order})
        ref = future.wrapped_future
        self._refs.add(ref)
        try:
            while not ray.wait([ref], timeout=POLL_S)[0]:
                if not processes.wait_before_retry(0):
                    raise processes.StageError(f"{order.stage} is not waited for: the run is cancelled")
        finally:
            self._refs.discard(ref)
        future.wait()
        dispatch.check_completed(f"{order.stage}, made on Ray", future.state)
        log("made on Ray; collecting")

    def cancel(self) -> None:
        """Kill the processes of all tasks; the guard of each then ends its stage. An interrupt would not reach a blocked read."""
        for ref in list(self._refs):
            ray.cancel(ref, force=True)


def _count_node_gpus(needs: StageResources) -> float:
    """Return the GPUs to ask Ray for; for `all`, as many as the largest live node has."""
    if needs.gpus == "all":
        return float(max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]))
    return float(needs.gpus)
