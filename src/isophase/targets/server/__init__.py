"""A model behind HTTP as a target; torch is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isophase.lazy import lazily

if TYPE_CHECKING:
    from isophase.targets.server.judge import failed
    from isophase.targets.server.protocols import Reply
    from isophase.targets.server.target import ServerTarget
    from isophase.targets.server.tokenizer import FileTokenizer

__all__ = ["FileTokenizer", "Reply", "ServerTarget", "failed"]

__getattr__, __dir__ = lazily(__name__, __file__)
