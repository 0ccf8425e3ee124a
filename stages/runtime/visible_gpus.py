"""The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""

import os


def list_named_gpus() -> list[str] | None:
    """Return the indices or UUIDs in CUDA_VISIBLE_DEVICES, in its order; None where it is not set: all are visible."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [gpu.strip() for gpu in named.split(",") if gpu.strip()]
