"""benchmark: measure one cell on the torch engine, beside plain decoding.   python -m stages.benchmark WORKLOAD CHECKPOINT TREE

What is measured, and how, is one story for every engine: measuring/cell_run.py.
"""

from stages.measuring import cell_run
from stages.params import stage_inputs
from stages.params.engines import TORCH
from stages.telemetry.run_stage import run_stage


def main(workload_name: str, checkpoint_name: str, tree_name: str) -> None:
    params = stage_inputs.read_params("benchmark", workload_name, checkpoint_name, tree_name)
    cell_run.measure_cell(params, TORCH.name, workload_name, checkpoint_name, tree_name)


if __name__ == "__main__":
    run_stage(main)
