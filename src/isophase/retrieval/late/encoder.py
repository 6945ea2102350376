"""An embedding model, read as what late chunking needs: token vectors before its mean.

Legend: B windows of one batch, T tokens, D width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from isophase.errors import IsophaseError
from isophase.retrieval.late.pooling import FloatArray
from isophase.retrieval.late.tokens import ExactTokenizer, IntArray

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_UNLIMITED = 1_000_000
# On a CPU more does not fit its cache; a GPU wants to be filled.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 32_768}
# On a CPU a forward pass takes about as long as so many tokens of one thread do, whatever it reads: a row that would
# need more padding begins another batch. A GPU has no use for small batches.
_CALL_TOKENS = 32
_SAMPLED_NUMBERS = 64


class Encoder:
    """Token vectors of a mean-pooling model.

    Args:
        model: folder or hub id, of sentence-transformers or for `AutoModel`; or a loaded `SentenceTransformer`.
        window_tokens: tokens of one window, special tokens included; default the length that sentence-transformers'
            files state for the model, else what its positions allow. Beyond the stated length vectors may be poor.
        batch_tokens: most tokens of one forward pass, padding included; default what suits the device.
        device: torch device; default CUDA where there is one, else the CPU.
        dtype: `float32`, `float16` or `bfloat16`; default float32.
        document_prompt: text before every window of a document; default what the model's settings say.
        query_prompt: text before every question; default what the model's settings say.

    Attributes:
        name: of the model, as given.
        width: D.
        window_tokens: as above.
        limit_tokens: most that it can be.
        dtype: precision that it computes in.
        normalises: whether the model scales its embeddings to length 1.

    Raises:
        IsophaseError: for a model that cannot be loaded, that does not pool by the mean, or with a step behind it.
    """

    def __init__(
        self,
        model: str | Any,
        *,
        window_tokens: int | None = None,
        batch_tokens: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        document_prompt: str | None = None,
        query_prompt: str | None = None,
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise IsophaseError(f"dtype {dtype!r} is unknown.", f"Give one of {', '.join(DTYPES)}.")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if isinstance(model, str):
            self.name = model
            stated = _read_modules(model)
            tokenizer = _load(AutoTokenizer, model, "tokenizer")
            self.model = _load_model(model, DTYPES[dtype or "float32"])
        else:
            self.name = str((getattr(model, "model_card_data", None) and model.model_card_data.base_model) or "loaded")
            stated, tokenizer = _take_apart(model), model.tokenizer
            self.model = model[0].auto_model
            if dtype is not None:
                self.model = self.model.to(DTYPES[dtype])
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise IsophaseError(
                f"{self.name!r} is an encoder-decoder.", "Give an encoder such as BERT, or a decoder without encoder."
            )
        self.model = self.model.to(self.device).eval()
        self.width = int(self.model.config.hidden_size)
        self.normalises = stated.normalises
        before_documents = stated.document_prompt if document_prompt is None else document_prompt
        before_queries = stated.query_prompt if query_prompt is None else query_prompt
        self.documents = ExactTokenizer(tokenizer, before_documents)
        self.queries = ExactTokenizer(tokenizer, before_queries)
        self.limit_tokens = _positions(self.model, tokenizer)
        self.window_tokens = window_tokens or min(self.limit_tokens, stated.window_tokens or self.limit_tokens)
        if self.window_tokens > self.limit_tokens:
            raise IsophaseError(
                f"windows of {self.window_tokens} tokens exceed the {self.limit_tokens} that {self.name!r} reads.",
                f"Give --window {self.limit_tokens} or less.",
            )
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        self._pad = int(getattr(tokenizer, "pad_token_id", None) or 0)
        self.batch_tokens = batch_tokens or _BATCH_TOKENS.get(self.device.type, _BATCH_TOKENS["cuda"])

    def capacity(self, tokenizer: ExactTokenizer) -> int:
        """Tokens of a text in one window.

        Raises:
            IsophaseError: if special tokens and the prompt leave no room.
        """
        room = self.window_tokens - len(tokenizer.head_ids) - len(tokenizer.tail_ids)
        if room < 1:
            raise IsophaseError(
                f"windows of {self.window_tokens} tokens have no room beside special tokens and the prompt.",
                "Give a larger --window.",
            )
        return room

    def vectors(self, inputs: Sequence[IntArray]) -> Iterator[tuple[int, FloatArray]]:
        """Token vectors of whole inputs, special tokens included; the longest first, in batches of like length.

        Args:
            inputs: ids of each, at most `window_tokens`.

        Yields:
            Number of the input, and its vectors [T, D].
        """
        order = sorted(range(len(inputs)), key=lambda n: (-len(inputs[n]), n))
        padding = _CALL_TOKENS * torch.get_num_threads() if self.device.type == "cpu" else self.batch_tokens
        begin = 0
        while begin < len(order):
            longest = len(inputs[order[begin]])
            most = max(1, self.batch_tokens // max(longest, 1))
            rows = [row for row in order[begin : begin + most] if longest - len(inputs[row]) <= padding]
            ids_BT = torch.full((len(rows), longest), self._pad, dtype=torch.long)
            mask_BT = torch.zeros(len(rows), longest, dtype=torch.long)
            for n, row in enumerate(rows):
                length = len(inputs[row])
                ids_BT[n, :length] = torch.from_numpy(inputs[row])
                mask_BT[n, :length] = 1
            # Without padding no mask is needed, and attention without a mask is faster.
            mask = {} if bool(mask_BT.all()) else {"attention_mask": mask_BT.to(self.device)}
            with torch.inference_mode():
                out_BTD = self.model(input_ids=ids_BT.to(self.device), **mask).last_hidden_state
            found = out_BTD.float().cpu().numpy()
            for n, row in enumerate(rows):
                yield row, found[n, : len(inputs[row])]
            begin += len(rows)

    def fingerprint(self) -> str:
        """Digest of special tokens and a sample of every parameter: equal models give equal digests."""
        digest = sha256(self.documents.head_ids.tobytes() + self.documents.tail_ids.tobytes())
        for name, parameter in sorted(self.model.named_parameters()):
            if name.startswith("pooler."):
                continue  # unused, and random where a checkpoint lacks it
            sample = parameter.detach().flatten()[:_SAMPLED_NUMBERS].float().cpu().numpy()
            digest.update(f"{name}{tuple(parameter.shape)}".encode() + sample.tobytes())
        return digest.hexdigest()[:16]


def _load(loader: Any, path: str, what: str, **kwargs: Any) -> Any:
    """Load a part of a model; any failure becomes one line.

    Raises:
        IsophaseError: naming the path and transformers' own reason.
    """
    local = path.startswith((".", "/", "~")) or Path(path).exists()
    where = str(Path(path).expanduser()) if local else path
    if local and not Path(where).is_dir():
        raise IsophaseError(
            f"model folder {path!r} does not exist or is not a folder.",
            "Give a folder with config.json and safetensors, or a hub id such as org/name.",
        )
    shown = transformers_logging.is_progress_bar_enabled()
    if local:
        transformers_logging.disable_progress_bar()
    try:
        return loader.from_pretrained(where, **kwargs)
    except Exception as error:  # third-party readers of third-party files raise anything
        reason = shorten(str(error), 300) or type(error).__name__
        raise IsophaseError(
            f"cannot load the {what} of {path!r}: {reason}",
            "Check the path; a hub id needs network access or a filled cache.",
        ) from error
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _load_model(path: str, dtype: torch.dtype) -> Any:
    """The network below the pooling.

    Raises:
        IsophaseError: if it cannot be loaded, or weights are missing: transformers fills those with random numbers.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        model, loading = _load(AutoModel, path, "model", dtype=dtype, output_loading_info=True)
    finally:
        transformers_logging.set_verbosity(verbosity)
    # BERT's own pooler stands behind the token vectors and is not used.
    if missing := sorted(key for key in loading["missing_keys"] if not key.startswith("pooler.")):
        raise IsophaseError(
            f"the weights of {path!r} lack {len(missing)} parameters, such as {missing[0]!r}.",
            "The download is incomplete, or the weights belong to another configuration.",
        )
    return model


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """What sentence-transformers knows of a model beyond its weights."""

    normalises: bool = False
    window_tokens: int | None = None
    document_prompt: str = ""
    query_prompt: str = ""


def _read_modules(path: str) -> _Stated:
    """What sentence-transformers' files say; nothing where there are none.

    Raises:
        IsophaseError: for pooling other than the mean, or steps that cannot be applied to a chunk's mean.
    """
    modules = _json(path, "modules.json")
    if modules is None:
        return _Stated()
    kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
    for module, kind in zip(modules, kinds, strict=True):
        if kind == "Pooling":
            _check_pooling(path, _json(path, f"{module['path']}/config.json") or {})
    _check_kinds(path, kinds)
    prompts = (_json(path, "config_sentence_transformers.json") or {}).get("prompts") or {}
    return _Stated(
        normalises="Normalize" in kinds,
        window_tokens=(_json(path, "sentence_bert_config.json") or {}).get("max_seq_length"),
        document_prompt=str(prompts.get("document") or ""),
        query_prompt=str(prompts.get("query") or ""),
    )


def _json(path: str, name: str) -> Any:
    """A file of a model, parsed; None where it is not there."""
    from transformers.utils import cached_file

    local = Path(path).expanduser() / name
    found = local if local.is_file() else None
    if found is None and not Path(path).expanduser().is_dir() and not path.startswith((".", "/", "~")):
        try:
            found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        except OSError:
            return None
    if found is None:
        return None
    try:
        return json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as error:
        raise IsophaseError(f"{name} of {path!r} is damaged ({error}).", "Download the model again.") from error


def _take_apart(model: Any) -> _Stated:
    """The same of a loaded `SentenceTransformer`."""
    kinds = [type(module).__name__ for module in model]
    for module, kind in zip(model, kinds, strict=True):
        if kind == "Pooling":
            _check_pooling("the model", module.get_config_dict())
    _check_kinds("the model", kinds)
    prompts = getattr(model, "prompts", None) or {}
    return _Stated(
        normalises="Normalize" in kinds,
        window_tokens=model.max_seq_length,
        document_prompt=str(prompts.get("document") or ""),
        query_prompt=str(prompts.get("query") or ""),
    )


def _check_pooling(path: str, settings: dict[str, Any]) -> None:
    modes = [
        key.removeprefix("pooling_mode_") for key, on in settings.items() if key.startswith("pooling_mode_") and on
    ]
    stated = settings.get("pooling_mode", modes or ["mean_tokens"])
    stated = [stated] if isinstance(stated, str) else list(stated)
    if stated not in (["mean_tokens"], ["mean"]):
        raise IsophaseError(
            f"{path!r} pools by {' and '.join(stated)}; late chunking averages token vectors.",
            "Give a model that pools by the mean.",
        )


def _check_kinds(path: str, kinds: list[str]) -> None:
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Normalize"}:
        raise IsophaseError(
            f"{path!r} is made of {', '.join(kinds)}; late chunking needs Transformer, Pooling and at most Normalize.",
            "Give another model.",
        )


def _positions(model: Any, tokenizer: Any) -> int:
    """Most tokens of one input, special tokens included."""
    limits = [int(tokenizer.model_max_length)]
    config = model.config
    if (stated := getattr(config, "max_position_embeddings", None)) is not None:
        table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
        # RoBERTa and its kin count positions from behind the padding index.
        reserved = getattr(table, "padding_idx", None)
        limits.append(int(stated) - (0 if reserved is None else int(reserved) + 1))
    return min([limit for limit in limits if 0 < limit < _UNLIMITED] or [512])
