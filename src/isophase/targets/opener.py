"""`open_target` turns a spec into a target; torch is imported only if it is needed."""

from __future__ import annotations

from dataclasses import asdict

from isophase.errors import IsophaseError
from isophase.specs import read_spec
from isophase.targets.base import ServerOptions, Target


def open_target(spec: str, *, gguf_file: str | None = None, server: ServerOptions | None = None) -> Target:
    """Open a target by its spec.

    Args:
        spec: in the grammar of `isophase.specs`: `isophase:NAME` (a bundled model), `hf:PATH_OR_ID` (any transformers
            causal language model), `hf:PATH_OR_ID|METHOD` (one that answers from a compressed cache),
            `hf:PATH_OR_ID|prefill(PATTERNS)` (one that reads prompts sparsely), `http://HOST:PORT/v1#MODEL` (a server)
            or `planted:...` (a fake model with a known effect).
        gguf_file: GGUF file inside the folder of an `hf:` spec.
        server: how to treat a server; None: as it suits the server.

    Returns:
        The target. Weights are loaded, and servers asked, on the first question, not here.

    Raises:
        IsophaseError: for an unknown kind or name, or where torch is needed and missing.
    """
    read = read_spec(spec)
    if read.calls and (read.kind != "hf" or len(read.calls) > 1):
        raise IsophaseError(
            f"{read.base!r} cannot be asked with {'|'.join(read.calls)!r}.",
            "A cache method or prefill(...) goes with hf:PATH_OR_ID, one at a time.",
        )
    if read.kind == "planted":
        from isophase.targets.planted import PlantedTarget

        return PlantedTarget.from_spec(spec)
    if read.kind == "server":
        from isophase.targets.server.target import ServerTarget

        return ServerTarget(spec, **asdict(server or ServerOptions()))
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise IsophaseError(
            f"{spec} needs torch and transformers, and {error.name} is not installed.",
            "Install them with: pip install 'isophase[torch]'.",
        ) from error
    if read.kind == "isophase":
        from isophase.targets.bundled import open_bundled

        return open_bundled(read.place)
    for call in read.calls:
        if call.startswith("prefill(") and call.endswith(")"):
            from isophase.targets.sparse import SparseTarget

            return SparseTarget(read.place, patterns=call[len("prefill(") : -1], gguf_file=gguf_file)
        from isophase.targets.compressed import CompressedTarget

        return CompressedTarget(read.place, cache=call, gguf_file=gguf_file)
    from isophase.targets.huggingface import HuggingFaceTarget

    return HuggingFaceTarget(read.place, gguf_file=gguf_file)
