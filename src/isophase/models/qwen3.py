"""A causal language model with a compressed memory: Qwen3 backbone, transformers' interfaces.

Importing this module registers the model with `AutoConfig` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from isophase.models.attention import CompressedAttention, Rotary
from isophase.models.chunks import ChunkReader, LayerChunks
from isophase.models.compat import CACHE_ARGUMENT, cache_argument, cache_of
from isophase.models.compressor import WindowBranch
from isophase.models.config import CompressedQwen3Config
from isophase.models.masks import block_mask, dense_mask
from isophase.models.memory import CompressedCache
from isophase.models.router import BoundaryRouter, ratio_loss


class CompressedDecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Pre-norm attention and MLP, as in Qwen3."""

    def __init__(self, config: CompressedQwen3Config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = CompressedAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_BTD: torch.Tensor, **attention: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer; keyword arguments go to `CompressedAttention`."""
        attended, weights = self.self_attn(self.input_layernorm(hidden_BTD), **attention)
        hidden_BTD = hidden_BTD[:, attention.get("keep", slice(None))] + attended
        mixed: torch.Tensor = hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))
        return mixed, weights


class CompressedQwen3PreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """Initialisation and capabilities shared by the backbone and the language model."""

    config_class = CompressedQwen3Config
    base_model_prefix = "model"
    _no_split_modules = ["CompressedDecoderLayer"]  # noqa: RUF012  transformers reads this list
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, WindowBranch):
            module.initialise(std)
        if isinstance(module, nn.Embedding) and self.config.embedding_range is not None:
            module.weight.normal_(0.0, self.config.embedding_range)


class RotaryAngles(nn.Module):
    """Cosine and sine for the rotated channels of a head, which may be all, some or none."""

    def __init__(self, config: CompressedQwen3Config) -> None:
        super().__init__()
        self.angles: Qwen3RotaryEmbedding | None = None
        if config.rotary_dims != 0:
            rotated = config if config.rotary_dims is None else copy.deepcopy(config)
            if config.rotary_dims is not None:
                rotated.head_dim = config.rotary_dims
            self.angles = Qwen3RotaryEmbedding(config=rotated)

    def forward(self, hidden_BTD: torch.Tensor, position_T: torch.Tensor) -> Rotary:
        """Angles at positions [T] or [*, T], each [1, T, R] or [*, T, R], in the dtype of `hidden_BTD`."""
        shape = position_T.shape if position_T.dim() > 1 else (1, *position_T.shape)
        if self.angles is None:
            none = hidden_BTD.new_zeros(*shape, 0)
            return none, none
        flat = position_T[None] if position_T.dim() == 1 else position_T.flatten(0, -2)
        cos, sin = self.angles(hidden_BTD, flat)
        return cos.view(*shape, cos.shape[-1]), sin.view(*shape, sin.shape[-1])


class CompressedQwen3Model(CompressedQwen3PreTrainedModel):
    """The backbone: embeddings, layers, final norm."""

    def __init__(self, config: CompressedQwen3Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(CompressedDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryAngles(config)
        routed = config.compressed and config.chunk_rule != "fixed" and config.chunk_score == "router"
        routers = [BoundaryRouter(config.hidden_size) for _ in range(config.chunk_groups if routed else 0)]
        self.routers = nn.ModuleList(routers)
        self._chunk_reader = ChunkReader(config, routers) if config.compressed else None
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: CompressedCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        last_tokens: int = 0,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the backbone.

        Args:
            input_ids: [B, T] new tokens; or `inputs_embeds` [B, T, D].
            attention_mask: [B, past + T], 1 for tokens. Padding is allowed on the right, and only in
                a call that continues nothing.
            position_ids: ignored; a compressed memory counts positions by itself.
            cache: memory of earlier tokens, changed in place. `past_key_values` is the older name.
            inputs_embeds: embeddings instead of ids.
            use_cache: return a memory; default from the configuration, off in training.
            output_hidden_states: return the hidden states of all layers.
            output_attentions: return attention weights (eager implementation only).
            last_tokens: return only the states of the last tokens, so many; the last layer then skips the
                others' queries and MLP. 0: all.
            **kwargs: the older name of `cache`; anything else is left alone.

        Raises:
            ValueError: for padding on the left, which would be pooled into entries.
            TypeError: for another kind of cache on a compressed model.
        """
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = CompressedCache(self.config)
        if self.config.compressed and cache is not None and not isinstance(cache, CompressedCache):
            raise TypeError(f"a {type(cache).__name__} cannot hold compressed entries; pass a CompressedCache, or none")
        past = cache.get_seq_length() if cache is not None else 0
        length = hidden.shape[1]
        refuse_unsafe_padding(attention_mask, past)

        position_T = torch.arange(past, past + length, device=hidden.device)
        rotary: Rotary = self.rotary_emb(hidden, position_T)
        chunks = self._read_chunks(input_ids, hidden, cache)
        # Layers with the same chunks share their angles and their mask.
        different = {id(c): c for c in chunks}
        entry_rotary = {key: None if c is None else self._entry_rotary(hidden, c) for key, c in different.items()}
        blocks = self.config._attn_implementation == "flex_attention"
        masks = {
            key: self._mask(c, past, position_T, hidden.dtype, whole=not last_tokens) for key, c in different.items()
        }

        states, weights = [hidden], []
        for number, (layer, own) in enumerate(zip(self.layers, chunks, strict=True), start=1):
            # A block mask cannot be cut.
            few = last_tokens and number == len(self.layers) and not blocks
            wanted = slice(-last_tokens, None) if few else slice(None)
            hidden, attended = layer(
                hidden,
                rotary=rotary,
                entry_rotary=entry_rotary[id(own)],
                mask=masks[id(own)],
                memory=cache,
                chunks=own,
                keep=wanted,
            )
            states.append(hidden)
            weights.append(attended)
        hidden = self.norm(hidden[:, -last_tokens:])
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=(*states[:-1], hidden) if output_hidden_states else None,
            attentions=tuple(weights) if output_attentions else None,
            **cache_argument(cache if use_cache else None),
        )

    def router_loss(self, input_ids: torch.Tensor) -> torch.Tensor | None:
        """What training adds to the loss so that chunks have the wanted mean length; None without routers.

        Args:
            input_ids: [B, T], as in `forward`.
        """
        if not len(self.routers):
            return None
        hidden, config = self.embed_tokens(input_ids), self.config
        losses = [ratio_loss(r(hidden), config.chunk_threshold, config.chunk_target_tokens) for r in self.routers]
        loss: torch.Tensor = config.router_weight * torch.stack(losses).mean()
        return loss

    def _read_chunks(
        self, input_ids: torch.Tensor | None, hidden: torch.Tensor, cache: CompressedCache | None
    ) -> list[LayerChunks] | list[None]:
        """What every layer executes over; equal layers share one object."""
        if self._chunk_reader is None:
            return [None] * len(self.layers)
        if input_ids is None:
            if self.config.chunk_rule != "fixed" and self.config.chunk_score in ("hash", "ranks"):
                raise ValueError("chunks that follow the content are cut by token ids; give input_ids")
            input_ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        if cache is not None:
            return cache.read_chunks(self._chunk_reader, input_ids, hidden)
        return self._chunk_reader.read(input_ids, hidden, None)[0]

    def _mask(
        self, chunks: LayerChunks | None, past: int, position_T: torch.Tensor, dtype: torch.dtype, whole: bool
    ) -> Any:
        """Who sees what, as the attention implementation wants it.

        Args:
            chunks: of the layer.
            past: tokens read before this call.
            position_T: positions of the new tokens.
            dtype: of the attention.
            whole: whether every layer answers all new tokens.
        """
        if self.config._attn_implementation == "flex_attention":
            return block_mask(self.config, chunks, past, position_T)
        # What stock Qwen3 leaves to the kernel's causal order, full attention here leaves to it too.
        causal = self.config._attn_implementation == "sdpa" and past == 0 and whole
        if chunks is None and (causal or len(position_T) == 1):
            return None
        return dense_mask(self.config, chunks, past, position_T, dtype)

    def _entry_rotary(self, hidden: torch.Tensor, chunks: LayerChunks) -> Rotary:
        """Angles at the anchors of new entries, each [B or 1, K or 1, E, R]."""
        cos, sin = self.rotary_emb(hidden, chunks.anchor_BGE)
        share = self.config.num_key_value_heads // chunks.anchor_BGE.shape[1]
        if chunks.anchor_BGE.shape[1] == 1:
            return cos, sin
        return cos.repeat_interleave(share, dim=1), sin.repeat_interleave(share, dim=1)


class CompressedQwen3ForCausalLM(CompressedQwen3PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The language model. Works with `generate`, `from_pretrained` and `save_pretrained`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: CompressedQwen3Config) -> None:
        super().__init__(config)
        self.model = CompressedQwen3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: CompressedCache | None = None,
        past_key_values: CompressedCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As the backbone's `forward`, with logits and, given labels [B, T] (-100: ignored), a loss.

        `logits_to_keep`: 0 for all positions, n for the last n, or a tensor of indices.
        """
        # Hidden states and attentions are wanted whole; only logits can do with fewer positions.
        whole = kwargs.get("output_hidden_states") or kwargs.get("output_attentions") or labels is not None
        few = logits_to_keep if isinstance(logits_to_keep, int) and not whole else 0
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            last_tokens=few,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden if few else hidden[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **cache_argument(cache_of(outputs)),
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # transformers would build a DynamicCache, which cannot hold entries.
        if self.config.compressed and generation_config.use_cache is not False:
            if generation_config.cache_implementation not in (None, "dynamic", "hybrid"):
                raise ValueError(
                    f"cache_implementation={generation_config.cache_implementation!r} cannot hold a "
                    "compressed memory; leave it unset"
                )
            if model_kwargs.get(CACHE_ARGUMENT) is None:
                model_kwargs[CACHE_ARGUMENT] = CompressedCache(self.config)
                if getattr(
                    generation_config, "is_assistant", False
                ):  # its tokens are taken back where they are refused
                    model_kwargs[CACHE_ARGUMENT].activate_past_recording()
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


def refuse_unsafe_padding(attention_mask: torch.Tensor | None, past_tokens: int) -> None:
    """Raise where padding would be pooled into entries or shift phases.

    Args:
        attention_mask: [B, T] of 0 and 1, or None.
        past_tokens: tokens that the memory already holds.

    Raises:
        ValueError: padding on the left, in the middle, or in a call that continues a memory.
    """
    if attention_mask is None or bool(attention_mask.all()):
        return
    if attention_mask.dim() != 2:
        raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions; a mask [batch, tokens] is needed")
    steps = attention_mask.long().diff(dim=1)
    if past_tokens or bool((steps > 0).any()) or not bool(attention_mask[:, 0].all()):
        raise ValueError(
            "this model cannot read padding on the left or before a continuation: pads would be pooled into "
            "compressed entries and shift every phase; batch prompts of equal length or pad on the right"
        )


AutoConfig.register(CompressedQwen3Config.model_type, CompressedQwen3Config)
AutoModel.register(CompressedQwen3Config, CompressedQwen3Model)
AutoModelForCausalLM.register(CompressedQwen3Config, CompressedQwen3ForCausalLM)
