"""The models that a recipe can name, freshly initialised, and their tokenizer."""

from __future__ import annotations

from hashlib import sha256
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from isophase.errors import IsophaseError
from isophase.lab.train.recipe import Recipe
from isophase.lab.train.tasks.lookup import LookupStage
from isophase.lab.train.tasks.stream import parts_of
from isophase.models import CompressedQwen3Config, CompressedQwen3ForCausalLM
from isophase.probes import END_ID, PAD_ID, WORDS


def build_model(recipe: Recipe, tokenizer: Any | None = None) -> Any:
    """A freshly initialised model. Parameters of equal name and shape start equal in matched recipes.

    Args:
        recipe: architecture, settings and seed.
        tokenizer: of the recipe; None: the closed vocabulary, or, where the recipe names a tokenizer,
            its `model.vocab_size`.

    Returns:
        A `CompressedQwen3ForCausalLM` or `DeepseekV4ForCausalLM` on torch's default device.

    Raises:
        IsophaseError: for settings that the configuration refuses.
    """
    config_class, model_class = _classes(recipe.architecture)
    # transformers takes any keyword: a misspelt `compression_stride` would train full attention.
    known = {*config_class().to_dict(), "embedding_range"}
    if unknown := sorted(set(recipe.model) - known):
        raise IsophaseError(
            f"recipe {recipe.name!r}: model: there is no setting {unknown[0]!r}.",
            f"The settings are those of {config_class.__name__}.",
        )
    try:
        config = config_class(**_vocabulary(recipe, tokenizer), **recipe.model)
        model = model_class(config)
    except (ValueError, TypeError, RuntimeError, StrictDataclassError) as error:
        raise IsophaseError(
            f"recipe {recipe.name!r}: model: {shorten(str(error), 300)}.",
            "Correct the recipe's `model` settings.",
        ) from error
    _initialise(model, recipe.seed)
    return model


def load_tokenizer(recipe: Recipe) -> Any:
    """The recipe's tokenizer, or the word-level one of the bundled models.

    Raises:
        IsophaseError: if it cannot be loaded.
    """
    if recipe.tokenizer is None:
        return pairs_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(recipe.tokenizer)
    # Third-party readers of third-party files raise anything; all of it means the same to the user.
    except Exception as error:
        raise IsophaseError(
            f"cannot load the tokenizer {recipe.tokenizer!r}: {shorten(str(error), 200)}",
            "Give a folder that holds tokenizer.json, or a hub id.",
        ) from error


def pairs_tokenizer() -> PreTrainedTokenizerFast:
    """The word-level tokenizer of the bundled models."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def grid_of(model: PreTrainedModel) -> tuple[int | None, int | None]:
    """Window and stride of a model's compressor, in tokens; None without one."""
    config = model.config
    if config.model_type != "deepseek_v4":
        return config.compression_window, config.compression_stride
    # CSA windows overlap by one stride, HCA windows do not.
    overlap = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 1}
    found = [(config.compress_rates[kind], overlap[kind]) for kind in config.layer_types if kind in overlap]
    if not found:
        return None, None
    stride, factor = min(found)
    return stride * factor, stride


def _classes(architecture: str) -> tuple[Any, Any]:
    if architecture == "compressed_qwen3":
        return CompressedQwen3Config, CompressedQwen3ForCausalLM
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    return DeepseekV4Config, DeepseekV4ForCausalLM


def _vocabulary(recipe: Recipe, tokenizer: Any | None) -> dict[str, Any]:
    """Settings that the tokenizer decides; with a tokenizer the recipe may ask for a larger table."""
    style = "pairs" if any(isinstance(part, LookupStage) for part in parts_of(recipe.stages)) else None
    if recipe.tokenizer is None:
        ids = {"vocab_size": len(WORDS), "pad_token_id": PAD_ID, "eos_token_id": END_ID, "bos_token_id": None}
        return {**ids, "record_style": style}
    if tokenizer is None:
        return {"record_style": style}
    asked = recipe.model.get("vocab_size", len(tokenizer))
    if isinstance(asked, int) and asked < len(tokenizer):
        raise ValueError(f"vocab_size={asked} is less than the {len(tokenizer)} tokens of {recipe.tokenizer!r}")
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    decided = {**ids, "vocab_size": asked, "record_style": style}
    return {name: value for name, value in decided.items() if name not in recipe.model}


@torch.no_grad()
def _initialise(model: Any, seed: int) -> None:
    """Draw every matrix from a generator of its own, seeded by its name."""
    config = model.config
    embeddings = model.get_input_embeddings().weight
    embedding_range = getattr(config, "embedding_range", None)
    for name, parameter in model.named_parameters():
        # Norm weights, gate biases and other vectors are constants at the start.
        if parameter.dim() < 2 or name.endswith("gate_bias_WK"):
            continue
        # What slots add to matrices that they share starts at 0.
        if name.endswith(("payload_WDC", "gate_WDK")) and getattr(config, "slot_parameters", "") == "both":
            continue
        own = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:8]) >> 1
        generator = torch.Generator(parameter.device).manual_seed(own) if not parameter.is_meta else None
        wide = parameter is embeddings and embedding_range is not None
        parameter.normal_(0.0, embedding_range if wide else config.initializer_range, generator=generator)
