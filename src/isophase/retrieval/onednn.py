"""Linear layers through oneDNN on a CPU, where torch would take its BLAS library.

In float32 torch leaves linear layers to BLAS (MKL on x86-64), which does not make the most of every CPU. oneDNN is part
of torch, too, and what torch.compile takes for linear layers; calling it directly needs neither a compiler nor a copy
of the weights. Measured in `bench/README.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class OneDnnLinear(TorchFunctionMode):
    """Within it, float32 linear layers on the CPU are computed by oneDNN; results differ by rounding only.

    For inference: the operator has no gradient.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take the place of `functional.linear`; call everything else as it is."""
        if func is functional.linear and not kwargs and args[0].dtype == args[1].dtype == torch.float32:
            bias = args[2] if len(args) > 2 else None
            return torch.ops.mkldnn._linear_pointwise(args[0], args[1], bias, "none", [], "")
        return func(*args, **(kwargs or {}))


def fast_linear(device: torch.device) -> AbstractContextManager[Any]:
    """The fastest linear layers for inference on a device: oneDNN's on a CPU whose torch has them, else torch's own."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type == "cpu" and available and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return OneDnnLinear()
    return nullcontext()
