"""A transformers model that reads or remembers in another way than its own, as a call behind its spec says."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from isophase.probes import Prompt
from isophase.targets.huggingface import HuggingFaceTarget
from isophase.targets.strides import Grid


class ModifiedTarget(HuggingFaceTarget):
    """`hf:PATH|CALL`. Prompts are read whole, each by itself: what becomes of a shared beginning depends on the rest.

    Args:
        path: safetensors folder or hub id.
        call: as in the spec.
        fact: name of what `describe` says of it.
        told: what is said there.
        **kwargs: as for `HuggingFaceTarget`.

    Raises:
        IsophaseError: if the model or its tokenizer cannot be used.
    """

    def __init__(self, path: str, *, call: str, fact: str, told: str, **kwargs: Any) -> None:
        super().__init__(path, **kwargs)
        self.name = f"hf:{path}|{call}"
        self._fact, self._told = fact, told
        self.added_grids: list[Grid] = []

    @property
    def identity(self) -> str:
        """What answers depend on besides the model, for its fingerprint."""
        return self._told

    @property
    def grids(self) -> list[Grid]:
        """The grid that the call adds, then those of the model."""
        # The defaults of a model ask for its grids before there is a call.
        return getattr(self, "added_grids", []) + super().grids

    def fingerprint(self) -> str:
        """Digest of the model and the call."""
        return sha256(f"{super().fingerprint()} {self.identity}".encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Facts for the manifest."""
        return {**super().describe(), self._fact: self._told}

    def _may_share(self, group: list[Prompt]) -> bool:
        """Never."""
        self._shares_prefix = False
        return False
