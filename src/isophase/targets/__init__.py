"""What answers prompts. Torch is imported only for what needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.targets.base import (
        REPEAT_EVERY,
        SERVER_CHOICES,
        Answer,
        AnswerStatus,
        RemoteTarget,
        ServerOptions,
        SharingTarget,
        StreamingTarget,
        Target,
        TargetDefaults,
    )
    from isophase.targets.huggingface import HuggingFaceTarget, HuggingFaceTokenizer, load_part
    from isophase.targets.opener import open_target
    from isophase.targets.planted import PlantedTarget
    from isophase.targets.strides import Grid, grids_of

__all__ = [
    "REPEAT_EVERY",
    "SERVER_CHOICES",
    "Answer",
    "AnswerStatus",
    "Grid",
    "HuggingFaceTarget",
    "HuggingFaceTokenizer",
    "PlantedTarget",
    "RemoteTarget",
    "ServerOptions",
    "SharingTarget",
    "StreamingTarget",
    "Target",
    "TargetDefaults",
    "grids_of",
    "load_part",
    "open_target",
]

__getattr__, __dir__ = lazily(__name__, __file__)
