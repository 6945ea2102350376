"""What answers prompts. `open_target` turns a spec into a target; torch is imported only if it is needed."""

from __future__ import annotations

from dataclasses import asdict

from isophase.errors import IsophaseError
from isophase.targets.base import (
    SERVER_CHOICES,
    Answer,
    AnswerStatus,
    RemoteTarget,
    ServerOptions,
    StreamingTarget,
    Target,
)

__all__ = [
    "SERVER_CHOICES",
    "Answer",
    "AnswerStatus",
    "RemoteTarget",
    "ServerOptions",
    "StreamingTarget",
    "Target",
    "open_target",
]

_KINDS = "isophase:NAME, hf:PATH_OR_ID, http://HOST:PORT/v1#MODEL or planted:SETTINGS"


def open_target(spec: str, *, gguf_file: str | None = None, server: ServerOptions | None = None) -> Target:
    """Open a target by its spec.

    Args:
        spec: `isophase:NAME` (a bundled model), `hf:PATH_OR_ID` (any transformers causal language model),
            `hf:PATH_OR_ID|METHOD` (one that answers from a compressed cache), `hf:PATH_OR_ID|prefill(PATTERNS)` (one
            that reads prompts sparsely), `http://HOST:PORT/v1#MODEL` (a
            server) or `planted:...` (a fake model with a known effect).
        gguf_file: GGUF file inside the folder of an `hf:` spec.
        server: how to treat a server; None: as it suits the server.

    Returns:
        The target. Weights are loaded, and servers asked, on the first question, not here.

    Raises:
        IsophaseError: for an unknown kind or name, or where torch is needed and missing.
    """
    kind, colon, rest = spec.partition(":")
    if kind == "planted" and colon:
        from isophase.targets.planted import PlantedTarget

        return PlantedTarget.from_spec(spec)
    if kind in ("http", "https") and rest.startswith("//"):
        from isophase.targets.server.target import ServerTarget

        return ServerTarget(spec, **asdict(server or ServerOptions()))
    if kind not in ("isophase", "hf") or not rest:
        raise IsophaseError(
            f"unknown target {spec!r}.", f"A target is {_KINDS}; `isophase models` lists the bundled ones."
        )
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise IsophaseError(
            f"{spec} needs torch and transformers, and {error.name} is not installed.",
            "Install them with: pip install 'isophase[torch]'.",
        ) from error
    if kind == "isophase":
        from isophase.targets.bundled import open_bundled

        return open_bundled(rest)
    path, bar, cache = rest.partition("|")
    if cache.startswith("prefill(") and cache.endswith(")"):
        from isophase.targets.sparse import SparseTarget

        return SparseTarget(path, patterns=cache[len("prefill(") : -1], gguf_file=gguf_file)
    if bar:
        from isophase.targets.compressed import CompressedTarget

        return CompressedTarget(path, cache=cache, gguf_file=gguf_file)
    from isophase.targets.huggingface import HuggingFaceTarget

    return HuggingFaceTarget(rest, gguf_file=gguf_file)
