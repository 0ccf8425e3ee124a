"""A decorator that compiles a function with torch.compile on a GPU and leaves it as it is on a CPU."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
BACKEND = "inductor"  # another one in tests
# RMSNorm's gradients of states and of weights are one kernel at all sizes. By default Inductor (torch 2.11) chooses by the size,
# so that the first pack of fewer than 2H positions compiles a function again, for seconds in which all other ranks wait.
INDUCTOR_OPTIONS: dict[str, Any] = {"triton.mix_order_reduction_non_strict_mode": True}
_COMPILES = ContextVar("_COMPILES", default=True)


@contextmanager
def without_compiling() -> Iterator[None]:
    """Run functions as they are within the block, on a GPU too: some hundred steps on one row end before they were compiled."""
    token = _COMPILES.set(False)
    try:
        yield
    finally:
        _COMPILES.reset(token)


def compile_on_cuda(function: F) -> F:
    """Compile `function` for dynamic shapes at its first call with a CUDA tensor; the compiler is not imported earlier.

    It is compiled once for all sizes: two sizes that happen to be equal at the first call are not taken for one (duck
    shapes), or the first TTT step, where all sizes are equal, would have code of its own.
    """
    compiled: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_on_gpu(args):
            return function(*args, **kwargs)
        from torch._dynamo import config
        from torch.fx.experimental import _config as shape_config

        if not compiled:
            config.specialize_float = True  # or eps of a norm is tried as a variable first: traced twice
            options = INDUCTOR_OPTIONS if BACKEND == "inductor" else None
            compiled.append(torch.compile(function, dynamic=True, backend=BACKEND, options=options))
        with shape_config.patch(use_duck_shape=False):
            return compiled[0](*args, **kwargs)

    return call  # type: ignore[return-value]


def is_on_gpu(args: tuple[Any, ...]) -> bool:
    """Return whether any of the arguments is a CUDA tensor, and functions are compiled there."""
    return _COMPILES.get() and any(isinstance(x, Tensor) and x.is_cuda for x in args)
