# python examples/audit_a_model.py                       as a script: pictures go to isophase-examples/
# jupytext --to ipynb examples/audit_a_model.py          as a notebook

# %% [markdown]
# # Audit a model
#
# Some language models compress their KV cache: every few tokens become one entry. A fact then has a *phase*, its
# position inside its chunk, and the model may find it at one phase and lose it at another. In this notebook you audit
# two small models that come with isophase, from Python, and learn to read the result: what is asked, what accuracy by
# phase looks like with its interval, what the verdict rests on, and why two usual summaries, the mean and a grid of
# depths in per cent, do not show the effect. It needs no network and no GPU, and takes well under a minute.

# %%
import warnings
from functools import cache
from pathlib import Path

# A notebook without widgets has no use for their progress bars.
warnings.filterwarnings("ignore", message="IProgress not found")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from isophase.audit.analyse import build_report, observe
from isophase.audit.plan import outlook
from isophase.audit.report import write_report
from isophase.audit.run import default_folder, load_run, plan_for, run_plan
from isophase.audit.settings import AuditSettings
from isophase.probes import build_probe
from isophase.targets import open_target

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
# ## Say what to audit
#
# `isophase:w8s8` writes one entry for every 8 tokens. `isophase:full` is its twin: trained on the same data, with
# nothing compressed. It is the *control*, asked the very same prompts. The configuration of `w8s8` names its stride;
# with `stride="scan"` we keep that to ourselves and let the audit look for a period on its own, as you would with a
# model you know nothing about.
#
# For a model of your own, write `hf:path/to/folder` instead, and leave `control` out if you have no twin.

# %%
# Opens each model once, however often it is asked for.
open_once = cache(open_target)

settings = AuditSettings(targets=("isophase:w8s8",), control="isophase:full", stride="scan", seed=0)

# %% [markdown]
# ## Plan
#
# The plan settles every prompt before the first one is asked. Each *item* is a set of records and one question about
# one of them; that record is then put at 24 neighbouring positions, one token apart. Records, question and length stay
# as they are: nothing but the phase moves.

# %%
folder = default_folder(settings, open_once)
plan = plan_for(settings, folder, open_once)

for part in plan.parts:
    view = outlook(part, open_once(part.target).tokenizer)
    print(
        f"{part.role:8}{part.target:15} {view.items} items x {view.window_tokens} positions = {view.prompts:,} prompts "
        f"of {view.length_tokens} tokens; finds an amplitude of {view.detectable_amplitude:.3f} or more"
    )

# %% [markdown]
# The amplitude is half the height of a wave, from peak to trough, in accuracy. This plan has a nine in ten chance of
# finding a wave of the size printed above.
#
# The prompts of these models are words that stand for single tokens. Here is the end of one prompt at two neighbouring
# positions: the queried record, marked, stands one token later, and the rest makes room.

# %%
part = plan.parts[0]
tokenizer = open_once(part.target).tokenizer
probe = build_probe(part.probe, tokenizer)


def words_around_record(prompt):
    words = [tokenizer.decode([token]).strip() for token in prompt.ids]
    first, last = prompt.position_tokens, prompt.position_tokens + prompt.span_tokens
    before, record = " ".join(words[first - 4 : first]), " ".join(words[first:last])
    return f"... {before} [{record}] {' '.join(words[last : last + 4])} ... {' '.join(words[-3:])}"


for column in (0, 1):
    prompt = probe.prompt(column)
    right = tokenizer.decode(prompt.answer_ids).strip()
    print(f"position {prompt.position_tokens}: {words_around_record(prompt)}   -> right answer: {right}")

# %% [markdown]
# ## Ask
#
# Every answer is written to the run folder as it comes. Stop this cell and run it again: it goes on where it stopped.
# Run the whole notebook again, and nothing is asked twice.

# %%
run_plan(plan, folder, open_once)
print(f"{plan.rows:,} answers in {folder}")

# %% [markdown]
# ## Read the result
#
# `build_report` is a function of the run folder alone: it asks the models nothing. `report.findings` holds one finding
# for each model; every number of `report.json` is an attribute with the same name.

# %%
report = build_report(folder, lambda spec: open_once(spec).tokenizer)
w8s8, full = report.findings

for finding in (w8s8, full):
    low, high = finding.gap_interval_points
    print(f"{finding.target}: {finding.verdict}")
    print(f"    {finding.sentence}")
    print(f"    accuracy {finding.accuracy:.2f}, period {finding.period_tokens}, worst phase {finding.worst_phase}")
    print(f"    gap {finding.gap_points:.1f} points (95 %: {low:.1f} to {high:.1f})")
    for reason in finding.reasons:
        print(f"    because {reason}")

# %% [markdown]
# *Sensitive* means two things together: the pattern is stronger than chance, all tried periods counted, and it is
# larger than the margin below which nobody would care (an amplitude of .02 unless you say otherwise). `w8s8` is
# sensitive, and the scan found the period 8 without being told. The verdict on its twin is *none*: no sensitivity
# above the margin, at this length and with this many records. The gap is the best minus the worst phase; which is best
# and which is worst is picked on one half of the items and measured on the other, so that noise does not inflate it.
#
# ### Accuracy by phase
#
# One bar for each phase: how often the answer was right when the queried record began there. The thin line is the 95 %
# interval. At phase 7, the *boundary phase*, the first token of the record falls into one entry and the next token
# into the next.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for ax, finding in zip(axes, (w8s8, full), strict=True):
    phases = np.arange(finding.axis_tokens)
    accuracy = np.array(finding.accuracy_by_phase)
    low, high = np.array(finding.interval_by_phase).T
    colours = [ORANGE if phase in finding.weak_phases else BLUE for phase in phases]
    ax.bar(phases, accuracy, width=0.72, color=colours)
    ax.vlines(phases, low, high, color="black", linewidth=1)
    ax.axhline(finding.accuracy, color=GREY, linestyle="--", linewidth=1)
    ax.text(7, finding.accuracy + 0.02, f"mean {finding.accuracy:.2f}", fontsize=8, ha="center")
    ax.set(title=f"{finding.target}: {finding.verdict}", xlabel="phase: position mod 8", xticks=phases, ylim=(0, 1.1))
axes[0].set_ylabel("share of right answers")
finish(figure, "audit-phases")

# %% [markdown]
# ### Which period
#
# The scan tries every period that fits the window. z is about 1 where nothing repeats; above the dashed line a period
# is significant although many were tried. A single bad phase in eight is far from a smooth wave, so its overtones, 4
# and 2, stand out as well. The audit names the one period that explains the others: take away what repeats every 8
# tokens, and nothing is left of 4 and 2.

# %%
figure, ax = plt.subplots(figsize=(9, 2.8))
for test in w8s8.scan:
    named = test.period_tokens == w8s8.scan_period_tokens
    ax.bar(str(test.period_tokens), test.z, width=0.6, color=ORANGE if named else BLUE)
ax.axhline(w8s8.scan_line_z, color="black", linestyle="--", linewidth=1)
ax.text(7, w8s8.scan_line_z + 0.6, "significant above", fontsize=8, ha="center")
ax.set(title=f"the scan names {w8s8.scan_period_tokens} tokens", xlabel="period, tokens", ylabel="z")
finish(figure, "audit-scan")

# %% [markdown]
# ## Why the mean hides it
#
# A mean of .86 beside 1.00 looks like an ordinary price: "compression costs some 14 points". A user gets something
# else. Seven phases are hardly worse than full attention, and at the eighth most answers are wrong. Nor are these hard
# questions: below, each row is one item, shifted so that equal phases stand in one column. The upright stripes, eight
# tokens apart, are the phase effect: the same question is right, wrong, and right again. The misses at both ends of
# the rows are something else: there the record has left the filler words and stands beside other records, with which
# it may share an entry. They fall on every phase equally often, so they cost accuracy and make no gap.

# %%
_, answers, _ = load_run(folder)
seen = observe(part, answers, tokenizer).observations
first_phase = seen.positions[:, 0] % 8
aligned = np.full((len(seen.outcomes), seen.outcomes.shape[1] + 7), np.nan)
for row, phase, outcomes in zip(aligned, first_phase, seen.outcomes, strict=True):
    row[phase : phase + len(outcomes)] = outcomes

figure, ax = plt.subplots(figsize=(9, 3.4))
ax.imshow(aligned, cmap=ListedColormap([ORANGE, "#c9dceb"]), aspect="auto", interpolation="none")
ax.set(
    title="w8s8, every answer: orange is a miss, white was not asked",
    xlabel="phase of the queried record",
    xticks=range(aligned.shape[1]),
    xticklabels=[str(column % 8) for column in range(aligned.shape[1])],
    ylabel="item",
)
finish(figure, "audit-items")

whole = seen.outcomes.mean(axis=1)
print(
    f"{w8s8.items} items: right at every position {w8s8.items_always_right}, at none {w8s8.items_never_right}, "
    f"at some {w8s8.items - w8s8.items_always_right - w8s8.items_never_right}"
)

# %% [markdown]
# ## Why depths in per cent hide it
#
# The usual test of a long context hides a fact at 0, 10, 20, ... 100 per cent of the prompt, for several lengths. Take
# lengths of 4,000, 8,000, ... 32,000 tokens. Ten per cent of each is a whole multiple of 8, so the first token of
# every needle stands at the same phase: 88 needles, one phase. The grid of positions and the grid of chunks run in
# step, and the effect is aliased away.

# %%
lengths = np.arange(4_000, 32_001, 4_000)
depths = np.linspace(0, 1, 11)
needles = np.rint(np.outer(lengths, depths)).astype(int).ravel()
by_depth = np.bincount(needles % 8, minlength=8)
by_audit = np.bincount(seen.positions.ravel() % 8, minlength=8)
print("needles at each phase 0..7, depths in per cent:", by_depth.tolist())
print("prompts at each phase 0..7, this audit:        ", by_audit.tolist())

# %% [markdown]
# Which phase they share is decided by something nobody looks at: how many tokens a system prompt or a chat template
# puts in front. The picture shows what such a test would report of `w8s8`, computed from the answers above: with
# no tokens in front it sees only phase 0 and finds the model nearly perfect; with 7, or 15, it sees only phase 7 and
# finds it broken. None of these tests shows that the phase is what matters.

# %%
in_front = np.arange(17)
reported = [seen.outcomes[seen.positions % 8 == shift % 8].mean() for shift in in_front]

figure, ax = plt.subplots(figsize=(9, 2.8))
ax.bar(in_front, reported, width=0.72, color=[ORANGE if shift % 8 == 7 else BLUE for shift in in_front])
ax.axhline(w8s8.accuracy, color=GREY, linestyle="--", linewidth=1)
ax.set(
    title="what a test by depth in per cent would report (dashed: mean over phases)",
    xlabel="tokens in front of the prompt (system prompt, chat template)",
    xticks=in_front,
    ylabel="share of right answers",
    ylim=(0, 1.1),
)
finish(figure, "audit-depths")

print(f"reported accuracy: {min(reported):.2f} to {max(reported):.2f}, the same model and the same questions")

# %% [markdown]
# Other lengths are no way out. With 1,000 tokens the needles stand at two phases; with 1,024 they stand at several,
# each at another depth, so that a weak phase looks like a weak depth. An audit asks each item at every phase, equally
# often, and starts at random positions.

# %%
for length in (1_000, 1_024):
    phases = np.rint(length * depths).astype(int) % 8
    print(f"{length} tokens, depths 0, 10, ... 100 per cent: phases {phases.tolist()}")

# %% [markdown]
# ## The page to pass on
#
# The same report as one HTML file without scripts, for people, and as JSON, for programs.

# %%
page = write_report(report, folder)
print(f"{page}  {page.with_suffix('.json')}")

# %% [markdown]
# ## What next
#
# - [Audit your own model](../docs/guides/audit-a-model.md): Hugging Face models, and sizes that suit them.
# - [Reading a report](../docs/guides/read-a-report.md): every figure and every field.
# - [Find the cause](../docs/guides/find-the-cause.md), or the notebook [why a model is sick](why_a_model_is_sick.py).
# - [The cure](../docs/results/cure.md): what chunks that follow the content do about it.
