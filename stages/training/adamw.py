"""AdamW over float32 weights, whatever the draft computes in, and gradients summed in float32 over packs and processes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

ADAM_BETAS = (0.9, 0.95)
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterWeightOptimizer:
    """A draft's float32 masters, which are its own parameters where those are float32, and their moments."""

    def __init__(
        self, draft: nn.Module, learning_rate: float, weight_decay: float, masters: dict[str, Tensor] | None = None
    ):
        """`masters` are what the draft's weights were before they were cast; none where they are float32."""
        self.weights = dict(draft.named_parameters())
        self.masters: dict[str, Tensor] = masters or dict(self.weights)
        self._adam = torch.optim.AdamW(
            list(self.masters.values()), lr=learning_rate, betas=ADAM_BETAS, weight_decay=weight_decay, fused=True
        )

    def collect(self) -> None:
        """After each backward: add the draft's gradients to the masters' and forget them."""
        for name, weight in self.weights.items():
            if (master := self.masters[name]) is not weight and weight.grad is not None:
                if master.grad is None:
                    master.grad = weight.grad.float()
                else:
                    master.grad += weight.grad
                weight.grad = None

    def step(self, learning_rate: float, clip: float) -> Tensor:
        """Sum gradients over processes, clip them to norm `clip`, move; -> the norm before, on the device, never waited for."""
        if dist.is_initialized():
            waits = [dist.all_reduce(g, async_op=True) for g in self._gradients() if not _is_sharded(g)]
            for wait in waits:
                wait.wait()
        norm = nn.utils.clip_grad_norm_(self.masters.values(), clip)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._adam.zero_grad()
        copies = [(w, m) for w, m in zip(self.weights.values(), self.masters.values(), strict=True) if w is not m]
        if copies:
            with torch.no_grad():
                torch._foreach_copy_([w for w, _ in copies], [m for _, m in copies])
        return norm

    def moments(self) -> dict[str, Tensor]:
        """By kind and name; none before the first step."""
        return {
            f"{kind}.{name}": self._adam.state[master][kind]
            for name, master in self.masters.items()
            for kind in ADAM_MOMENTS
            if master in self._adam.state
        }

    def restore(self, moments: dict[str, Tensor], step: int) -> None:
        """Take up the `moments` after `step` steps."""
        for name, master in self.masters.items() if step else ():
            self._adam.state[master] = {
                "step": torch.tensor(float(step), device=master.device),
                **{k: _shard_like(moments[f"{k}.{name}"], master) for k in ADAM_MOMENTS},
            }

    def _gradients(self) -> Iterable[Tensor]:
        return (m.grad for m in self.masters.values() if m.grad is not None)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")  # a DTensor of FSDP2, which has summed it already


def _shard_like(whole: Tensor, master: Tensor) -> Tensor:
    """A full tensor, moved and cut as `master` is."""
    whole = whole.to(master.device, copy=True)
    if not _is_sharded(master):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, master.device_mesh, master.placements)
