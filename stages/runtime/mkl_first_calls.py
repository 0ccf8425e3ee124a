"""Call each elementwise CPU function once, on import, before several threads share a tensor.

MKL selects the code path of cos, exp and the like at their first call. If two threads make that call at the same time, one
of them sometimes computes its half of the tensor by another code path, and sums round differently: one process in ten or
twenty trained to other last bits (docs/LOG.md, 2026-11-21).
"""

import torch

for _dtype in (torch.float32, torch.float64):
    _one = torch.ones(1, dtype=_dtype)
    for _function in (
        torch.cos, torch.sin, torch.tan, torch.tanh, torch.exp, torch.expm1, torch.log, torch.log2, torch.log10,
        torch.log1p, torch.erf, torch.erfc, torch.erfinv, torch.acos, torch.asin, torch.atan, torch.sqrt, torch.rsqrt,
        torch.pow,
    ):  # fmt: skip
        _function(_one, _one) if _function is torch.pow else _function(_one)
