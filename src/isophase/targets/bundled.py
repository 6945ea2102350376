"""The bundled models as targets."""

from __future__ import annotations

from isophase.errors import IsophaseError
from isophase.models import bundled_folder, bundled_names, training_record
from isophase.targets.base import TargetDefaults
from isophase.targets.huggingface import HuggingFaceTarget

CONTROL = "full"


def open_bundled(name: str) -> HuggingFaceTarget:
    """Open a bundled model, with the probe settings that it was trained for.

    Raises:
        IsophaseError: if there is no such model.
    """
    if name not in bundled_names():
        raise IsophaseError(
            f"there is no bundled model {name!r}.", f"The bundled models are {', '.join(bundled_names())}."
        )
    control = f"isophase:{CONTROL}" if name != CONTROL else None
    defaults = TargetDefaults.model_validate({"style": "pairs", "control": control, **training_record(name).probe})
    return HuggingFaceTarget(str(bundled_folder(name)), name=f"isophase:{name}", defaults=defaults)
