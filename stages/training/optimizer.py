"""Muon and AdamW on float32 master weights; gradients are summed in float32 over packs and processes.

Muon updates a matrix by its gradient's momentum with all singular values near one (Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon), scaled to the size of AdamW's updates (Liu et al., 2025,
https://arxiv.org/abs/2502.16982). It is torch.optim.Muon with adjust_lr_fn="match_rms_adamw", to its rounding. That one computes
in bfloat16, which on a CPU without such instructions takes 15 to 40 times the time of float32, and a matrix at a time; here
matrices of one shape are one product.

Muon needs whole matrices. Under FSDP each process gathers the momenta of all, and computes all updates: at 8B shape 0.7 GB are
sent and 20 TFLOP computed a step, beside 270 TFLOP of a pack of 16,384 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

ADAM_BETAS = (0.9, 0.95)
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTUM = 0.95
MUON_MOMENT = "momentum"
UPDATE_SIZE = 0.2  # root mean square of an AdamW update, in units of its rate
# Of the iteration x -> a x + b x^3 + c x^5 on singular values, which brings them to 0.7 to 1.2 in five steps.
NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS = (3.4445, -4.7750, 2.0315), 5


@dataclass(frozen=True)
class OptimizerSettings:
    """Rates at their peak, and weight decays."""

    learning_rate: float  # of AdamW
    weight_decay: float = 0.0
    muon_learning_rate: float | None = None  # None: AdamW trains matrices too
    muon_weight_decay: float = 0.0

    @property
    def matrix_rate(self) -> float:
        return self.muon_learning_rate or self.learning_rate


class MasterWeightOptimizer:
    """The optimizer of a draft's float32 master weights: its own parameters where those are float32, otherwise copies.

    Frozen weights have neither master weights nor moments.
    """

    def __init__(
        self,
        draft: nn.Module,
        settings: OptimizerSettings,
        master_weights: dict[str, Tensor] | None = None,
        is_table: Callable[[str], bool] = lambda name: False,
    ):
        """`master_weights` are the trained weights before they were cast; None where they are float32.

        `is_table` says by its name whether a matrix has a row for each token: AdamW trains it.
        """
        self.settings = settings
        self.weights = {name: weight for name, weight in draft.named_parameters() if weight.requires_grad}
        self.master_weights: dict[str, Tensor] = master_weights or dict(self.weights)
        uses_muon = settings.muon_learning_rate is not None
        self._matrices = {n: w for n, w in self.master_weights.items() if uses_muon and w.ndim == 2 and not is_table(n)}
        self._momenta: dict[str, Tensor] = {}
        others = [w for n, w in self.master_weights.items() if n not in self._matrices]
        # AdamW refuses an empty list
        self._adam = torch.optim.AdamW(
            [{"params": others}], lr=0.0, betas=ADAM_BETAS, weight_decay=settings.weight_decay, fused=True
        )

    def add_gradients(self) -> None:
        """Move the draft's gradients to the master weights, adding them up; call after each backward."""
        for name, weight in self.weights.items():
            if (master := self.master_weights[name]) is not weight and weight.grad is not None:
                if master.grad is None:
                    master.grad = weight.grad.float()
                else:
                    master.grad += weight.grad
                weight.grad = None

    def step(self, share: float, clip: float) -> Tensor:
        """Sum gradients over processes, clip them to norm `clip` and update at this share of the peak rates.

        Return the norm before clipping, on the device.
        """
        if dist.is_initialized():
            gradients = [m.grad for m in self.master_weights.values() if m.grad is not None]
            handles = [dist.all_reduce(g, async_op=True) for g in gradients if not _is_sharded(g)]
            for handle in handles:
                handle.wait()
        norm = nn.utils.clip_grad_norm_(self.master_weights.values(), clip)
        for group in self._adam.param_groups:
            group["lr"] = self.settings.learning_rate * share
        self._adam.step()
        self._step_muon(share)
        for master in self.master_weights.values():
            master.grad = None
        cast = [name for name, master in self.master_weights.items() if self.weights[name] is not master]
        if cast:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self.weights[name] for name in cast], [self.master_weights[name] for name in cast]
                )
        return norm

    @torch.no_grad()
    def _step_muon(self, share: float) -> None:
        updates: dict[str, Tensor] = {}
        for name, master in self._matrices.items():
            if master.grad is not None:
                momentum = self._momenta.setdefault(name, torch.zeros_like(master))
                momentum.lerp_(master.grad, 1 - MUON_MOMENTUM)
                updates[name] = gather_full_tensor(master.grad.lerp(momentum, MUON_MOMENTUM))
        rate = (self.settings.muon_learning_rate or 0.0) * share
        for name, update in orthogonalise_matrices(updates).items():
            master = self._matrices[name]
            master.mul_(1 - rate * self.settings.muon_weight_decay)
            master.sub_(_shard_like(update, master) * (rate * UPDATE_SIZE * max(master.shape) ** 0.5))

    def get_moments(self) -> dict[str, Tensor]:
        """Return the moments as `KIND.WEIGHT`; empty before the first step."""
        of_adam = {
            f"{kind}.{name}": self._adam.state[master][kind]
            for name, master in self.master_weights.items()
            for kind in ADAM_MOMENTS
            if master in self._adam.state
        }
        return of_adam | {f"{MUON_MOMENT}.{name}": momentum for name, momentum in self._momenta.items()}

    def restore_moments(self, moments: dict[str, Tensor], step: int) -> None:
        """Continue after `step` steps with the `moments` of `get_moments`.

        Raises ValueError where another optimizer made them.
        """
        for name, master in self.master_weights.items() if step else ():
            kinds = (MUON_MOMENT,) if name in self._matrices else ADAM_MOMENTS
            if missing := [kind for kind in kinds if f"{kind}.{name}" not in moments]:
                found = sorted({key.partition(".")[0] for key in moments if key.endswith(f".{name}")} - {"master"})
                raise ValueError(
                    f"train_draft: the checkpoint to go on from has of {name} {', '.join(found) or 'no moment'}, expected "
                    f"{missing[0]}: another optimizer trained it; set train_draft.optimizer and train_head as they were (before "
                    "Muon: adamw, true), or train from e000"
                )
            restored = {kind: _shard_like(moments[f"{kind}.{name}"], master).clone() for kind in kinds}
            if name in self._matrices:
                self._momenta[name] = restored[MUON_MOMENT]
            else:
                self._adam.state[master] = {"step": torch.tensor(float(step), device=master.device), **restored}


def orthogonalise_matrices(matrices: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return each matrix with its singular values near one, in float32; matrices of one shape are computed together."""
    by_shape: dict[tuple[int, int], list[str]] = {}
    for name, matrix in matrices.items():
        rows, columns = matrix.shape
        by_shape.setdefault((min(rows, columns), max(rows, columns)), []).append(name)
    found: dict[str, Tensor] = {}
    for (rows, _), names in by_shape.items():
        wide = torch.stack([m if len(m := matrices[name]) == rows else m.T for name in names])  # [N, rows, columns]
        for name, x in zip(names, _iterate_newton_schulz(wide).float(), strict=True):
            found[name] = x if x.shape == matrices[name].shape else x.T
    return found


def _iterate_newton_schulz(x: Tensor) -> Tensor:
    """Return x [N, rows, columns], rows <= columns, with all singular values near one; on a GPU in bfloat16."""
    x = x.bfloat16() if x.is_cuda else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that FSDP may have sharded; all processes must call it."""
    gather = getattr(tensor, "full_tensor", None)  # of a DTensor
    return gather() if gather else tensor


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")  # a DTensor, whose gradient FSDP2 has summed already


def _shard_like(full: Tensor, master: Tensor) -> Tensor:
    """Return a full tensor on the device of `master`, sharded as `master` is."""
    full = full.to(master.device)
    if not _is_sharded(master):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, master.device_mesh, master.placements, src_data_rank=None)  # each has it whole
