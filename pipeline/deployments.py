"""The deployments of prefect.yaml on the server of `make ui`: their forms, and that for workers of other hosts."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import Flow, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker
from ruamel.yaml import YAML

from pipeline import freshness
from pipeline.remote import prefect_worker
from stages.params.recipe import RECIPES_FOLDER
from stages.params.schema import load_params
from stages.params.section import PARAMS_FILE

STAGE = "stage"  # of prefect.yaml, for workers; the others are run by `make ui`


def read_deployments() -> dict[str, dict[str, Any]]:
    """Return the deployments of prefect.yaml by name, so that both ways to deploy offer the same."""
    found = YAML(typ="safe").load(Path(__file__).parent.with_name("prefect.yaml").read_text(encoding="utf-8"))
    return {deployment["name"]: deployment for deployment in found["deployments"]}


def deploy_stage() -> None:
    """Create the work pool for workers of other hosts, and the deployment that runs send there, unless they exist.

    Workers run it in the folder in which they were started.
    """
    deployment = read_deployments()[STAGE]
    pool = deployment["work_pool"]["name"]
    template = ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=pool, type=ProcessWorker.type, base_job_template=template))
        client.create_deployment(
            client.create_flow(prefect_worker.stage),
            deployment["name"],
            description=deployment["description"],
            work_pool_name=pool,
            entrypoint="pipeline.remote.prefect_worker.stage",
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $PWD }}"}}],
            parameter_openapi_schema=parameter_schema(prefect_worker.stage).model_dump_for_openapi(),
        )


def prepare_pool() -> None:
    """Deploy for workers if params.yaml sends stages to them; else a run that does so deploys it."""
    try:
        expects_workers = load_params().schedule.runner == "workers"
    except (ValueError, OSError):  # a run says what is wrong with params.yaml
        expects_workers = False
    if expects_workers:
        deploy_stage()
    else:
        remove_idle_pool()


def remove_idle_pool() -> None:
    """Remove the pool and its deployment if no worker is there: the pages would show both as not ready, in red.

    A worker that starts creates the pool again, a run that sends stages the deployment.
    """
    pool = read_deployments()[STAGE]["work_pool"]["name"]
    with get_client(sync_client=True) as client:
        with suppress(ObjectNotFound):
            client.read_work_pool(pool)
            if any(one.status == WorkerStatus.ONLINE for one in client.read_workers_for_work_pool(pool)):
                return
            client.delete_work_pool(pool)
        with suppress(ObjectNotFound):
            client.delete_deployment(client.read_deployment_by_name(f"{STAGE}/{STAGE}").id)


def digest_names() -> str:
    """Return a digest of the files from which the forms take the names that they offer."""
    return freshness.digest_paths([str(PARAMS_FILE), str(RECIPES_FOLDER)])


def update_forms(flows: dict[str, Flow[Any, Any]]) -> None:
    """Let the forms of deployments, by name, offer the names that params.yaml and recipes/ have now."""
    with get_client(sync_client=True) as client:
        for name, flow in flows.items():
            schema = parameter_schema(flow).model_dump_for_openapi()
            found = client.read_deployment_by_name(f"{flow.name}/{name}")
            client.update_deployment(found.id, DeploymentUpdate(parameter_openapi_schema=schema))
