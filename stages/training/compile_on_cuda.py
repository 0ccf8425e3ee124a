"""A decorator that compiles a function with torch.compile on a GPU and leaves it as it is on a CPU."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def compile_on_cuda(function: F) -> F:
    """Compile `function` for dynamic shapes at its first call with a CUDA tensor; the compiler is not imported earlier."""
    compiled: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, Tensor) and x.is_cuda for x in args):
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function, dynamic=True))
        return compiled[0](*args, **kwargs)

    return call  # type: ignore[return-value]
