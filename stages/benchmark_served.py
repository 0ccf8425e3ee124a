"""benchmark_served: measure one cell on a serving engine.   python -m stages.benchmark_served ENGINE WORKLOAD [CHECKPOINT TREE]

Without a checkpoint and a tree it is the baseline: the same server without a draft.
"""

from stages.measuring import cell_run
from stages.params import stage_inputs
from stages.telemetry.run_stage import run_stage


def main(engine: str, workload_name: str, checkpoint_name: str = "", tree_name: str = "") -> None:
    if bool(checkpoint_name) != bool(tree_name):
        raise ValueError(
            f"expected ENGINE WORKLOAD [CHECKPOINT TREE], found {engine} {workload_name} {checkpoint_name}; a cell with a "
            "draft needs both"
        )
    stage = "benchmark_served" if checkpoint_name else "benchmark_served_baseline"
    names = filter(None, (engine, workload_name, checkpoint_name, tree_name))
    params = stage_inputs.read_params(stage, *names)
    cell_run.measure_cell(params, engine, workload_name, checkpoint_name or None, tree_name or None)


if __name__ == "__main__":
    run_stage(main)
