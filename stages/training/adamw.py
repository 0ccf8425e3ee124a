"""AdamW on float32 master weights; gradients are summed in float32 over packs and processes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

ADAM_BETAS = (0.9, 0.95)
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterWeightOptimizer:
    """AdamW over a draft's float32 master weights: its own parameters where those are float32, otherwise copies."""

    def __init__(
        self,
        draft: nn.Module,
        learning_rate: float,
        weight_decay: float,
        master_weights: dict[str, Tensor] | None = None,
    ):
        """`master_weights` are the draft's weights before they were cast; None where they are float32."""
        self.weights = dict(draft.named_parameters())
        self.master_weights: dict[str, Tensor] = master_weights or dict(self.weights)
        self._adam = torch.optim.AdamW(
            list(self.master_weights.values()),
            lr=learning_rate,
            betas=ADAM_BETAS,
            weight_decay=weight_decay,
            fused=True,
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

    def step(self, learning_rate: float, clip: float) -> Tensor:
        """Sum gradients over processes, clip them to norm `clip` and update; return the norm before clipping, on the device."""
        if dist.is_initialized():
            gradients = [m.grad for m in self.master_weights.values() if m.grad is not None]
            handles = [dist.all_reduce(g, async_op=True) for g in gradients if not _is_sharded(g)]
            for handle in handles:
                handle.wait()
        norm = nn.utils.clip_grad_norm_(self.master_weights.values(), clip)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._adam.zero_grad()
        cast = [name for name, master in self.master_weights.items() if self.weights[name] is not master]
        if cast:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self.weights[name] for name in cast], [self.master_weights[name] for name in cast]
                )
        return norm

    def get_moments(self) -> dict[str, Tensor]:
        """Return the moments as `KIND.WEIGHT`; empty before the first step."""
        return {
            f"{kind}.{name}": self._adam.state[master][kind]
            for name, master in self.master_weights.items()
            for kind in ADAM_MOMENTS
            if master in self._adam.state
        }

    def restore_moments(self, moments: dict[str, Tensor], step: int) -> None:
        """Continue after `step` steps with the `moments` of `get_moments`."""
        for name, master in self.master_weights.items() if step else ():
            self._adam.state[master] = {
                "step": torch.tensor(float(step), device=master.device),
                **{k: _shard_like(moments[f"{k}.{name}"], master) for k in ADAM_MOMENTS},
            }


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")  # a DTensor, whose gradient FSDP2 has summed already


def _shard_like(full: Tensor, master: Tensor) -> Tensor:
    """Copy a full tensor to the device of `master`, sharded as `master` is."""
    full = full.to(master.device, copy=True)
    if not _is_sharded(master):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, master.device_mesh, master.placements)
