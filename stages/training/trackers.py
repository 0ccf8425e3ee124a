"""Logging to TensorBoard and Weights & Biases, which are optional packages (`pip install -e '.[track]'`).

Results do not depend on it. Files are written to runs/, which git and DVC ignore. Only numbers and the parameters of training
are sent: no code, no console output, no environment.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

RUNS_FOLDER = Path("runs")

LogStep = Callable[[int, dict[str, float]], None]  # (step, values by name)


@contextmanager
def open_trackers(names: Sequence[str], run: str, config: dict[str, Any], step: int) -> Iterator[LogStep]:
    """Yield a function that logs a step to all trackers of `names`.

    A resumed run has the same name `run` and continues at `step`. Raises ValueError where a tracker is not installed or does
    not start.
    """
    with ExitStack() as stack:
        logs: list[LogStep] = []
        for name in names:
            try:
                logs.append(stack.enter_context(TRACKERS[name](run, config, step)))
            except ImportError:
                raise ValueError(
                    f"train_draft.report_to names {name}, which is not installed; run: pip install -c constraints.txt -e "
                    "'.[track]', or take it off the list"
                ) from None

        def log(step: int, values: dict[str, float]) -> None:
            for log_to_tracker in logs:
                log_to_tracker(step, values)

        yield log


@contextmanager
def _open_tensorboard(run: str, config: dict[str, Any], step: int) -> Iterator[LogStep]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(RUNS_FOLDER / run, purge_step=step) as writer:
        writer.add_text("parameters", "\n".join(f"    {key}: {value}" for key, value in config.items()), step)

        def log(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def _open_wandb(run: str, config: dict[str, Any], step: int) -> Iterator[LogStep]:
    import wandb

    RUNS_FOLDER.mkdir(exist_ok=True)
    silent = wandb.Settings(disable_code=True, disable_git=True, console="off", save_code=False, silent=True)
    try:
        opened = wandb.init(
            project="aerie", name=run, id=run, resume="allow", dir=str(RUNS_FOLDER), config=config, settings=silent
        )
    except Exception as error:  # wandb's own classes, which change between versions
        raise ValueError(
            f"train_draft.report_to: wandb does not start ({type(error).__name__}: {error}); set WANDB_API_KEY, or "
            "WANDB_MODE=offline to keep its files in runs/, or take it off the list"
        ) from None
    with opened:
        yield lambda step, values: opened.log(values, step=step)


TRACKERS = {"tensorboard": _open_tensorboard, "wandb": _open_wandb}
