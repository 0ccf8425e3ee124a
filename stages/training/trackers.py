"""Curves for those who watch a run elsewhere: TensorBoard and Weights & Biases, optional packages (`pip install -e '.[track]'`).

Nothing of a result depends on them. Files lie under runs/, which neither git nor DVC looks at. Only numbers and the
parameters of training are sent: no code, no console output, no environment.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

RUNS_FOLDER = Path("runs")

LogStep = Callable[[int, dict[str, float]], None]  # (step, numbers by name)


@contextmanager
def open_trackers(names: Sequence[str], run: str, config: dict[str, Any], step: int) -> Iterator[LogStep]:
    """Inside the block, what tells every tracker of `names` about a step. `run` is the same for a run that goes on, from `step`.

    Raises ValueError where a tracker is not installed or doesn't start.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(TRACKERS[name](run, config, step)) for name in names]

        def log(step: int, numbers: dict[str, float]) -> None:
            for each in logs:
                each(step, numbers)

        yield log


@contextmanager
def _open_tensorboard(run: str, config: dict[str, Any], step: int) -> Iterator[LogStep]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise _make_missing_error("tensorboard") from None
    with SummaryWriter(RUNS_FOLDER / run, purge_step=step) as writer:
        writer.add_text("parameters", "\n".join(f"    {key}: {value}" for key, value in config.items()), step)

        def log(step: int, numbers: dict[str, float]) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

        yield log


@contextmanager
def _open_wandb(run: str, config: dict[str, Any], step: int) -> Iterator[LogStep]:
    try:
        import wandb
    except ImportError:
        raise _make_missing_error("wandb") from None
    RUNS_FOLDER.mkdir(exist_ok=True)
    silent = wandb.Settings(disable_code=True, disable_git=True, console="off", save_code=False, silent=True)
    try:
        opened = wandb.init(
            project="aerie", name=run, id=run, resume="allow", dir=str(RUNS_FOLDER), config=config, settings=silent
        )
    except Exception as error:  # of its own kinds, which change from version to version
        raise ValueError(
            f"train_draft.report_to: wandb does not start ({type(error).__name__}: {error}); set WANDB_API_KEY, or "
            "WANDB_MODE=offline to keep its files in runs/, or take it off the list"
        ) from None
    with opened:
        yield lambda step, numbers: opened.log(numbers, step=step)


def _make_missing_error(name: str) -> ValueError:
    return ValueError(
        f"train_draft.report_to names {name}, which is not installed; run: pip install -c constraints.txt -e '.[track]', or "
        "take it off the list"
    )


TRACKERS = {"tensorboard": _open_tensorboard, "wandb": _open_wandb}
