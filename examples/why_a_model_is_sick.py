# python examples/why_a_model_is_sick.py                 as a script: pictures go to isophase-examples/
# jupytext --to ipynb examples/why_a_model_is_sick.py    as a notebook

# %% [markdown]
# # Why a model is sick
#
# An audit says *that* a model loses facts at one phase. In this notebook you find out *why*, for `w8s8`, a small model
# that comes with isophase and writes one entry for every 8 tokens: which layer the weak phase hangs on, what its gates
# do, and which of the four causes of a phase effect is at work. You will learn to read knock-outs, gates and
# interventions, and what each of them can and cannot show. It needs no network and no GPU, and takes about a minute.

# %%
import warnings
from pathlib import Path

# A notebook without widgets has no use for their progress bars.
warnings.filterwarnings("ignore", message="IProgress not found")

import matplotlib.pyplot as plt
import numpy as np

from isophase.lab.explain.page import render_explanation
from isophase.lab.explain.run import explain

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


def draw_curve(ax, curve, marks=None):
    """Accuracy by phase with 95 % intervals; diamonds: another curve to compare with."""
    phases = np.arange(len(curve.by_phase))
    low, high = np.array(curve.interval_by_phase).T
    weak = [high[phase] < curve.accuracy for phase in phases]
    ax.bar(phases, curve.by_phase, width=0.72, color=[ORANGE if w else BLUE for w in weak])
    ax.vlines(phases, low, high, color="black", linewidth=1)
    if marks is not None:
        ax.plot(phases, marks, "D", color="black", markersize=4, markerfacecolor="white")
    ax.set(ylim=(0, 1.08), xticks=phases)


# %% [markdown]
# ## Measure
#
# `explain` asks the prompts of an audit again and again, each time with one thing in the model changed, and puts it
# back afterwards; files are never touched. 32 items keep this short; the command `isophase explain isophase:w8s8` asks
# 64. The result is one object, whose fields are those of `explain.json`.

# %%
found = explain("isophase:w8s8", items=32, say=lambda what: print("measuring:", what))

print(f"{found.prompts} prompts of {found.length_tokens} tokens, {found.records} records in each")
print(f"one entry for {found.stride_tokens} tokens; a record has {found.span_tokens} tokens")
print(f"a record that begins at phase {found.boundary_phases} is cut by the edge of a chunk")
print(found.summary[0])

# %% [markdown]
# ## The symptom
#
# At phase 7, the boundary phase, a record's key falls into one entry and its value into the next.

# %%
figure, ax = plt.subplots(figsize=(6, 2.8))
draw_curve(ax, found.baseline)
ax.set(title="w8s8 as it is", xlabel="phase of the record's first token", ylabel="share of right answers")
finish(figure, "explain-symptom")

# %% [markdown]
# ## Knock-outs: where in the model?
#
# Take one layer's attention output at the answering position and replace it by its mean over all prompts: whatever it
# said about *this* prompt is gone. Bars that stay at their diamonds (the model as it is) do not need the layer; bars
# that fall do.

# %%
layers = [knockout for knockout in found.knockouts if knockout.kind == "layer"]
figure, axes = plt.subplots(1, len(layers), figsize=(9, 2.8), sharey=True)
for ax, knockout in zip(axes, layers, strict=True):
    draw_curve(ax, knockout.after, found.baseline.by_phase)
    ax.set(title=f"without {knockout.name}", xlabel="phase of the record's first token")
axes[0].set_ylabel("share of right answers")
finish(figure, "explain-knockouts")

for knockout in found.knockouts:
    lost = [f"{100 * share:4.0f}" for share in knockout.lost_share_by_phase]
    word = "" if not knockout.selective else "selective" if knockout.surely_selective else "selective, not settled"
    print(f"{knockout.name:24} lost, %, by phase: {' '.join(lost)}  {word}")

# %% [markdown]
# Without layer 0 most is lost at every phase. Without layer 1 *only phase 7* fails, and there everything does: layer 1
# is *selective*. A record inside one chunk is read in layer 0 alone, from the one entry with its key and its value;
# a record in two entries needs a second layer to put it together. (This model has one KV head in each layer, so a layer
# and its KV head are the same thing; single query heads are listed as well.)
#
# That is where. It is not yet why: a layer that repairs the weak phase is not what makes it weak.
#
# ## Gates: does the compressor favour some slots?
#
# An entry is a weighted mean over the tokens of its window, and the weights come from a *gate*. If the gates ignored
# the slot at some offset, whatever stands there would be lost. Here is the mean weight of every slot.

# %%
figure, axes = plt.subplots(1, len(found.gates), figsize=(9, 2.5), sharey=True)
for ax, gate in zip(axes, found.gates, strict=True):
    offsets = np.arange(len(gate.weight_by_offset))
    ax.bar(offsets, gate.weight_by_offset, width=0.72, color=BLUE)
    ax.axhline(1 / len(offsets), color="black", linestyle="--", linewidth=1)
    ax.set(title=f"layer {gate.layer}, {gate.branch}", xlabel="offset in the window", xticks=offsets)
axes[0].set_ylabel("mean gate weight")
finish(figure, "explain-gates")

for gate in found.gates:
    print(
        f"layer {gate.layer}, {gate.branch:7} slots in use: {gate.static_slots:.1f} of {len(gate.weight_by_offset)} "
        f"on average over windows, {gate.per_window_slots:.1f} within one window"
    )

# %% [markdown]
# On average the weights spread over nearly all 8 slots (dashed: equal weights), while one window reads about half of
# them: mostly, the gates choose by content. But something stands out. In layer 0 the keys hardly look at offset 7, and
# the values look less at offset 0. Is a key lost at phase 7 *because* the gate ignores it there? Or has the gate
# learned to ignore it, because its value is in the next entry and this key is of no use? A suspect, then, but weights
# cannot tell cause from consequence. For that, something has to be taken away.
#
# ## Four causes, each taken away
#
# | cause | what makes the phase matter | how it is taken away |
# |---|---|---|
# | slot | parameters that belong to an offset | same parameters at all offsets; parameters rolled by every shift |
# | straddle | a record cut by the edge of a chunk | filler in front of the records that are cut, until they are not |
# | anchor | an entry's position is quantised | entries anchored at the record's own position |
# | visibility | the phase of the query itself | the question moved by 0 to 7 tokens, averaged |
#
# Each row below is one such intervention: the gap before (open), after (filled), and what the change means.
# *Cannot tell*: the intervention broke the model at all phases; a broken model has no gap, which shows nothing.

# %%
COLOURS = {"removes": "#2f7d4f", "reduces": "#2f7d4f", "enlarges": ORANGE, "cannot tell": GREY}
rows = [(cause.cause, act) for cause in found.causes for act in cause.interventions if act.after is not None]
places = np.arange(len(rows))[::-1]

figure, ax = plt.subplots(figsize=(9, 0.36 * len(rows) + 1))
for y, (_, act) in zip(places, rows, strict=True):
    colour = COLOURS.get(act.effect, BLUE)
    before, after = act.before.gap_points, act.after.gap_points
    ax.plot([before, after], [y, y], color=colour, linewidth=1.5)
    ax.plot(before, y, "o", color=colour, markerfacecolor="white")
    ax.plot(after, y, "o", color=colour)
    ax.text(104, y, act.effect, color=colour, va="center")
ax.set(
    title="gap before (open) and after (filled)",
    xlabel="gap, points",
    xlim=(-6, 102),
    yticks=places,
    yticklabels=[f"{cause}: {act.name}" for cause, act in rows],
)
ax.axvline(0, color=GREY, linewidth=1)
finish(figure, "explain-causes")

for cause, act in rows:
    low, high = act.change_interval_points
    print(f"{cause:11}{act.effect:13}{act.change_points:4.0f} points less ({low:3.0f} to {high:3.0f}): {act.name}")

# %% [markdown]
# Only one kind of change removes the gap: leaving no record cut. Whatever parameters serve there, the weakness stays
# at phase 7 as long as a record straddles the edge, and is gone as soon as it does not. The gates are cleared as well:
# give offset 7 the same gates as all others, and the gap grows. They had adapted to the edge.
#
# ### A closer look at the slot
#
# The slot deserves a second look, because the model *does* have parameters by offset. Roll them by every shift in turn.
# Then a weakness that belongs to the parameters moves along with them, and one that belongs to the phase stays.

# %%
rolls = found.cycling[0]
figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True)
draw_curve(axes[0], rolls.staying)
axes[0].set(title="stays: accuracy by phase, all rolls together", xlabel="phase of the record's first token")
draw_curve(axes[1], rolls.moving)
axes[1].set(title="moves: accuracy by the parameters' own offset", xlabel="offset the parameters were trained at")
axes[0].set_ylabel("share of right answers")
finish(figure, "explain-rolls")

stay, move = rolls.staying.gap_points, rolls.moving.gap_points
print(f"{stay:.0f} points stay with the phase, {move:.0f} move with the {rolls.parameters}")

# %% [markdown]
# Both! Does half of the weakness belong to the slot after all? No: look at *which* offset is weak on the right. It is
# 7, whose parameters and those of offset 0 stand on the two sides of a chunk edge. Training never showed them one
# record together; a roll puts them side by side inside a window, and the record between them is lost. What moves is the
# image of the edge. This is why the other interventions on the slot, which give all offsets the same parameters, do not
# remove the gap but enlarge it.
#
# ## Which one is it
#
# What each cause came to, in the words of the explanation, and the verdict:

# %%
removing = [cause.cause for cause in found.causes if any(act.effect == "removes" for act in cause.interventions)]
for cause in found.causes:
    print(f"{cause.cause.upper()}{'  <- this one' if cause.cause in removing else ''}")
    print(f"    {cause.conclusion}")
print()
print(f"The cause of the weak phase of w8s8: {', '.join(removing)}")

# %% [markdown]
# So the cure is to stop cutting records: chunks that follow the content. Changing gates, moving anchors or shifting the
# question would not have helped. In another model another cause may be at work; that is what `explain` is for.
#
# The same findings as one page for people:

# %%
Path("isophase-examples").mkdir(exist_ok=True)
page = Path("isophase-examples") / "explain.html"
page.write_text(render_explanation(found), encoding="utf-8")
print(page)

# %% [markdown]
# ## What next
#
# - [Find the cause](../docs/guides/find-the-cause.md) in a model of your own.
# - [The mechanism](../docs/explanations/mechanism.md): what each intervention does, and its limits.
# - [The cure](../docs/results/cure.md): the same task with chunks that start at records.
# - [Audit a model](audit_a_model.py), the notebook before this one.
