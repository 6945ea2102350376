"""Any transformers causal language model as a target.

Legend: B prompts of one batch, T tokens, A answer tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

import isophase.models.qwen3  # noqa: F401  registers our models with AutoModelForCausalLM
from isophase.errors import IsophaseError
from isophase.models import cache_argument, cache_of
from isophase.probes import Prompt
from isophase.targets.base import Answer, TargetDefaults
from isophase.targets.strides import Grid, grids_of

# Root mean square difference in log-probability between reading a prompt in one go and through a
# shared prefix that still counts as rounding, by dtype. A lost or misplaced state moves it by 1 and more;
# two orders of the same bfloat16 sums, in a model of 30 layers, by 0.1.
_REUSE_TOLERANCE = {torch.float32: 5e-4, torch.float16: 3e-2, torch.bfloat16: 2.5e-1}
# A shorter common prefix is not worth a forward pass of its own.
_SHORTEST_PREFIX_TOKENS = 16
_BATCH_TOKENS = 16_384
_SAMPLED_BLOCKS, _BLOCK_BYTES = 16, 4096


class HuggingFaceTokenizer:
    """A transformers tokenizer as probes need it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # What the tokenizer puts before a text by itself: start-of-text for some models, nothing for others.
        with_special = tokenizer("a")["input_ids"]
        without = tokenizer("a", add_special_tokens=False)["input_ids"]
        self.prefix_ids: tuple[int, ...] = ()
        for cut in range(len(with_special) - len(without) + 1):
            if with_special[cut : cut + len(without)] == without:
                self.prefix_ids = tuple(with_special[:cut])
                break

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def save(self, folder: Path) -> None:
        """Write the tokenizer beside a model."""
        self._tokenizer.save_pretrained(folder)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens kept."""
        text: str = self._tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False)
        return text


class HuggingFaceTarget:
    """Asks a transformers model. Prompts of one item share the reading of their common prefix.

    Args:
        path: safetensors folder or hub id.
        name: how the report calls it; default the path as given.
        gguf_file: name of a GGUF file inside `path`, dequantised on loading.
        device: torch device; default CUDA where there is one, else the CPU.
        dtype: precision to compute in; default what the weights are stored in where the device computes in it.
        batch_tokens: most tokens of one forward pass.
        defaults: probe settings that suit this model.

    Raises:
        IsophaseError: if the model or its tokenizer cannot be loaded.
    """

    grouped = True

    def __init__(
        self,
        path: str,
        *,
        name: str | None = None,
        gguf_file: str | None = None,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        batch_tokens: int = _BATCH_TOKENS,
        defaults: TargetDefaults | None = None,
    ) -> None:
        self.name = name or f"hf:{path}"
        self.path = path
        self.gguf_file = gguf_file
        self.batch_tokens = batch_tokens
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        extra = {"gguf_file": gguf_file} if gguf_file else {}
        self.config = load_part(AutoConfig, path, "configuration", **extra)
        self.tokenizer = HuggingFaceTokenizer(load_part(AutoTokenizer, path, "tokenizer", **extra))
        self.dtype = dtype or pick_dtype(self.config, self.device)
        self.defaults = defaults or self._defaults()
        self._extra = extra
        self._model: PreTrainedModel | None = None
        self._shares_prefix: bool | None = None

    def _defaults(self) -> TargetDefaults:
        """Probe settings for a model that says nothing about itself."""
        style = getattr(self.config, "record_style", None)
        # A CPU reads some hundred tokens a second. Known grids come with exact windows of up to 128 tokens,
        # and the record must lie well outside.
        slow_length = 512 if self.grids else 192
        length = 2048 if self.device.type == "cuda" else slow_length
        # A multiple of the window, which matches the moments of the positions exactly. An amplitude of 0.02 can be
        # excluded with 4,000 prompts where a model answers some items at some positions only, as small ones do.
        items = 168
        if self.max_length_tokens is not None:
            length = min(length, self.max_length_tokens)
        # Without a demonstration, small models talk about the question instead of answering it.
        return TargetDefaults(style=style, length_tokens=length, items=items, demonstrations=0 if style else 2)

    @property
    def model(self) -> PreTrainedModel:
        """The model, loaded on first use: planning and showing prompts need only the tokenizer."""
        if self._model is None:
            model, loading = load_part(
                AutoModelForCausalLM,
                self.path,
                "model",
                dtype=self.dtype,
                output_loading_info=True,
                **self._extra,
            )
            # transformers fills what is missing with random numbers and goes on.
            if missing := sorted(loading["missing_keys"]):
                raise IsophaseError(
                    f"the weights of {self.path!r} lack {len(missing)} parameters, such as {missing[0]!r}.",
                    "The download is incomplete, or the weights belong to another configuration.",
                )
            self._model = model.to(self.device).eval()
        return self._model

    @property
    def grids(self) -> list[Grid]:
        """Fixed compression grids that the configuration names."""
        return grids_of(self.config)

    @property
    def max_length_tokens(self) -> int | None:
        """Longest context that the configuration allows, or None."""
        config = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        limit = getattr(config, "max_position_embeddings", None)
        return int(limit) if limit else None

    def describe(self) -> dict[str, Any]:
        """Facts for the manifest."""
        return {
            "target": self.name,
            "model_type": self.config.model_type,
            "fingerprint": self.fingerprint(),
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "prefix_shared": self._shares_prefix,
        }

    def fingerprint(self) -> str:
        """Digest of configuration and weights (names, sizes, samples): no resume on another model."""
        digest = sha256(json.dumps(self.config.to_dict(), sort_keys=True, default=str).encode())
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            for file in sorted(folder.iterdir()):
                if file.suffix in {".safetensors", ".gguf", ".bin"}:
                    digest.update(f"{file.name} {file.stat().st_size}".encode())
                    digest.update(_sample(file))
        return digest.hexdigest()[:16]

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Answer prompts in order. Neighbours of one item and length are read together.

        Whether an answer is right is decided by teacher forcing: the most likely token at every
        position of the answer is the answer's own, which is what greedy decoding would give.
        """
        for _, group in groupby(prompts, key=_shape):
            yield from self._answer_or_error(list(group))

    def _answer_or_error(self, group: list[Prompt]) -> list[Answer]:
        """Answers of a group; where reading it fails, of each prompt alone, so that the others go on."""
        try:
            return self._answer_group(group)
        except (RuntimeError, ValueError, IndexError) as error:
            if len(group) > 1:
                return [answer for prompt in group for answer in self._answer_or_error([prompt])]
            detail = f"{type(error).__name__}: {shorten(str(error), 200)}"
            return [Answer(status="error", correct=False, log_probability=float("nan"), detail=detail)]

    def _answer_group(self, group: list[Prompt]) -> list[Answer]:
        share = self._may_share(group)
        logits_BAV = self._logits(group, [p.answer_ids for p in group], share=share)
        log_p_BAV = torch.log_softmax(logits_BAV.float(), dim=-1)
        picked_BA = log_p_BAV.argmax(dim=-1).cpu().numpy()
        answers_BA = torch.tensor([p.answer_ids for p in group], device=log_p_BAV.device)
        log_p_B = log_p_BAV.gather(-1, answers_BA[..., None])[..., 0].double().sum(dim=1).cpu().numpy()
        choices = [
            self._choice_log_probabilities(group, log_p_BAV, choice, share=share)
            for choice in range(len(group[0].choices))
        ]
        return [
            _judge(prompt, picked_BA[row], float(log_p_B[row]), tuple(float(c[row]) for c in choices))
            for row, prompt in enumerate(group)
        ]

    def _choice_log_probabilities(
        self, group: list[Prompt], log_p_BAV: torch.Tensor, choice: int, *, share: bool
    ) -> list[float]:
        """Log-probability of each prompt's n-th other choice."""
        ids = [p.choices[choice] for p in group]
        if all(len(i) == 1 for i in ids):
            first_B = torch.tensor([i[0] for i in ids], device=log_p_BAV.device)
            values: list[float] = log_p_BAV[:, 0].gather(-1, first_B[:, None])[:, 0].double().tolist()
            return values
        logits = self._logits(group, ids, share=share).float()
        ids_BA = torch.tensor(ids, device=logits.device)
        totals = torch.log_softmax(logits, dim=-1).gather(-1, ids_BA[..., None])[..., 0].double().sum(dim=1)
        values = totals.tolist()
        return values

    def _logits(self, group: list[Prompt], answers: list[tuple[int, ...]], *, share: bool) -> torch.Tensor:
        """Logits that predict each answer token, [B, A, V], on the CPU side in chunks of bounded size."""
        ids_BT = torch.from_numpy(
            np.stack(
                [
                    np.concatenate([p.ids, np.asarray(a[:-1], dtype=np.int32)])
                    for p, a in zip(group, answers, strict=True)
                ]
            )
        ).long()
        keep = len(answers[0])
        common = _common_prefix(ids_BT, keep) if share and len(group) > 1 else 0
        if self.grids:
            # Always cut at a chunk edge: the trial of the first item then speaks for all splits.
            common -= common % self.grids[0].stride_tokens
        rows = max(1, self.batch_tokens // ids_BT.shape[1])
        chunks = [ids_BT[first : first + rows] for first in range(0, len(ids_BT), rows)]
        with torch.inference_mode():
            if common < _SHORTEST_PREFIX_TOKENS:
                return torch.cat([self._forward(chunk, keep).logits for chunk in chunks])
            prefix = cache_of(self._forward(ids_BT[:1, :common], 1, use_cache=True))
            out = []
            for n, chunk in enumerate(chunks):
                # A forward pass changes the cache, so all but the last chunk work on a copy.
                cache = prefix if n == len(chunks) - 1 else copy.deepcopy(prefix)
                # One row becomes many: reordering, which beam search needs, is what every cache can do.
                cache.reorder_cache(torch.zeros(len(chunk), dtype=torch.long, device=self.device))
                out.append(self._forward(chunk[:, common:], keep, use_cache=True, **cache_argument(cache)).logits)
            return torch.cat(out)

    def _forward(self, ids: torch.Tensor, keep: int, *, use_cache: bool = False, **kwargs: Any) -> Any:
        return self.model(ids.to(self.device), logits_to_keep=keep, use_cache=use_cache, **kwargs)

    def _may_share(self, group: list[Prompt]) -> bool:
        """Whether to read a group through its common prefix; decided by the first group that has one."""
        if self._shares_prefix is None:
            ids_BT = torch.from_numpy(np.stack([p.ids for p in (group[0], group[-1])]))
            if len(group) < 2 or _common_prefix(ids_BT, 1) < _SHORTEST_PREFIX_TOKENS:
                return False
            self._shares_prefix = self._prefix_sharing_is_exact(group)
        return self._shares_prefix

    def _prefix_sharing_is_exact(self, group: list[Prompt]) -> bool:
        """Try the shared prefix once against reading whole prompts; where it differs it is not used."""
        pair = [group[0], group[-1]]
        answers = [p.answer_ids for p in pair]
        plain = torch.log_softmax(self._logits(pair, answers, share=False).float(), dim=-1)
        try:
            shared = torch.log_softmax(self._logits(pair, answers, share=True).float(), dim=-1)
        except (ValueError, TypeError, AttributeError, RuntimeError, NotImplementedError, IndexError):
            return False
        likely = plain > -10
        difference = (plain - shared)[likely].square().mean().sqrt().item() if bool(likely.any()) else 0.0
        return difference <= _REUSE_TOLERANCE.get(self.model.dtype, 5e-4)


def _judge(prompt: Prompt, picked: Any, log_probability: float, choices: tuple[float, ...]) -> Answer:
    if not np.isfinite(log_probability):
        return Answer(status="error", correct=False, log_probability=float("nan"), detail="non-finite logits")
    matches = [int(p) == a for p, a in zip(picked, prompt.answer_ids, strict=True)]
    correct = all(matches)
    length = len(matches) if correct else matches.index(False) + 1
    output = tuple(int(p) for p in picked[:length])
    well_formed = correct or not prompt.valid_first_ids or output[0] in prompt.valid_first_ids
    return Answer(
        status="ok" if well_formed else "wrong_format",
        correct=correct,
        log_probability=log_probability,
        output_ids=output,
        choice_log_probabilities=choices,
    )


def _sample(file: Path) -> bytes:
    """A few blocks spread over a file: training moves every weight, so they tell two models apart."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        blocks = []
        for n in range(_SAMPLED_BLOCKS):
            opened.seek(max(0, size - _BLOCK_BYTES) * n // (_SAMPLED_BLOCKS - 1))
            blocks.append(opened.read(_BLOCK_BYTES))
    return b"".join(blocks)


def _shape(prompt: Prompt) -> tuple[int, int, int, tuple[int, ...]]:
    """What neighbours must have in common to be read together."""
    return prompt.item, len(prompt.ids), len(prompt.answer_ids), tuple(len(ids) for ids in prompt.choices)


def _common_prefix(ids_BT: torch.Tensor, keep: int) -> int:
    """Number of leading tokens that all rows share, at most T - keep: the rest predicts the answer."""
    same_T = (ids_BT == ids_BT[:1]).all(dim=0)
    differs = (~same_T).nonzero()
    length = int(differs[0]) if len(differs) else ids_BT.shape[1]
    return min(length, ids_BT.shape[1] - keep)


def pick_dtype(config: Any, device: torch.device) -> torch.dtype:
    """The precision that a model is stored in, where the device computes in it; float32 on any other CPU."""
    stored = getattr(config, "dtype", None) or torch.float32
    if isinstance(stored, str):
        stored = getattr(torch, stored)
    if device.type != "cuda":
        return torch.bfloat16 if stored == torch.bfloat16 and _cpu_multiplies_bfloat16() else torch.float32
    if stored == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        return torch.float16
    assert isinstance(stored, torch.dtype)
    return stored


def _cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it: twice as fast as float32; without, it is slower."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def load_part(loader: Any, path: str, what: str, **kwargs: Any) -> Any:
    """Load a configuration, tokenizer or model; any failure becomes one line with a remedy.

    Raises:
        IsophaseError: naming the path and transformers' own reason.
    """
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists()
    if looks_local and not Path(path).expanduser().is_dir():
        raise IsophaseError(
            f"model folder {path!r} does not exist or is not a folder.",
            "Give a folder with config.json and safetensors, or a hub id such as org/name.",
        )
    gguf = kwargs.get("gguf_file")
    if gguf and looks_local and not (Path(path).expanduser() / gguf).is_file():
        raise IsophaseError(f"GGUF file {gguf!r} is not in {path!r}.", "Give the file's name inside the folder.")
    try:
        if not looks_local:
            return loader.from_pretrained(path, **kwargs)
        with _no_progress_bars():
            return loader.from_pretrained(str(Path(path).expanduser()), **kwargs)
    # Third-party readers of third-party files raise anything; all of it means the same to the user.
    except Exception as error:
        reason = shorten(str(error), 300) or type(error).__name__
        raise IsophaseError(
            f"cannot load the {what} of {path!r}: {reason}",
            "Check the path; a hub id needs network access or a filled cache.",
        ) from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide transformers' bars while a local folder is read; a download keeps its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
