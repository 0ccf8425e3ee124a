"""Stages made on an existing Ray cluster, each a task of Prefect's there: schedule.runner: ray.

Ray gives each node's stages its GPUs; what a node may do at once otherwise, its own lease says, as a worker's does.
"""

import signal
from collections.abc import Callable
from typing import Any, Self

import ray
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from ray.exceptions import RayError

from pipeline import dvc_graph
from pipeline.remote import dvc_remote
from pipeline.remote.prefect_worker import stage_on_ray
from stages.params.schedule import StageResources

ASK_EVERY = 1.0  # seconds


class RayCluster:
    """While it is entered; another process that ends leaves nothing there."""

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
        signal.signal(signal.SIGTERM, on_cancel)  # which Ray has taken for itself
        self._runner = RayTaskRunner(address=self._address).__enter__()  # finds that Ray is begun
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._runner.__exit__(*exc_info)
        ray.shutdown()

    def make(self, order: dvc_remote.StageOrder, needs: StageResources, say: Callable[[str], object]) -> None:
        one = stage_on_ray.with_options(name=order.stage, task_run_name=order.stage)
        with remote_options(
            num_cpus=1, num_gpus=_count_node_gpus(needs), max_retries=0
        ):  # again is what `schedule.attempts` says
            future: Any = self._runner.submit(one, {"order": order})
        ref = future.wrapped_future
        self._refs.add(ref)
        try:
            while not ray.wait([ref], timeout=ASK_EVERY)[0]:
                if not dvc_graph.wait_before_retry(0):
                    raise dvc_graph.StageError(f"{order.stage} is not waited for: the run is cancelled")
        finally:
            self._refs.discard(ref)
        future.wait()
        state = future.state
        if not state.is_completed():
            message = f"{order.stage}, made on Ray, {state.type.lower()}: {state.message}"
            raise dvc_graph.StageError(message, state.is_crashed() or dvc_graph.is_transient(message))
        say("made on Ray; collecting")

    def cancel(self) -> None:
        for ref in list(self._refs):
            ray.cancel(
                ref, force=True
            )  # the guard of its stage then ends that; a mere interrupt finds it waiting for a line


def _count_node_gpus(needs: StageResources) -> float:
    """Of a node; all: as many as the best one has."""
    if needs.gpus == "all":
        return float(max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]))
    return float(needs.gpus)
