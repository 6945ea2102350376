from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import ClassVar

import pytest

from isophase.audit.plan import batches, check_settings, make_plan, needs_pilot, outlook
from isophase.audit.run import default_folder, plan_for, run_plan
from isophase.audit.settings import Plan
from isophase.errors import IsophaseError
from isophase.targets import open_target
from isophase.targets.base import Answer, TargetDefaults
from isophase.targets.planted import PlantedTarget
from isophase.targets.strides import Grid

PLANTED = "planted:"


class Silent(PlantedTarget):
    """Any planted target, but it must not be asked anything."""

    def answer(self, prompts):
        raise AssertionError("asked")


class Configured:
    """A planted target with other facts about itself."""

    def __init__(self, inner=None, **facts):
        self._inner = inner or Silent()
        self.__dict__.update(facts)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def plan_of(settings, pilot=False, **targets):
    """A plan of `a`, `b`, ... by keyword, each a target."""
    return make_plan(settings, targets.__getitem__, pilot=pilot)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": 0}, "--items is 0; it must be at least 2"),
        ({"items": 1}, "--items is 1"),
        ({"records": 1}, "--records is 1; it must be at least 2"),
        ({"length_tokens": 7}, "--length is 7; it must be at least 8"),
        ({"window_tokens": 1}, "--window is 1"),
        ({"stride": 1}, "--stride is 1; it must be at least 2"),
        ({"stride": 16}, "--stride 16 is larger than the window of 8 positions.*Give --window 16 or more"),
        ({"margin": 0}, "--margin is 0.0; it must lie between 0 and 0.5"),
        ({"margin": 0.5}, "--margin is 0.5"),
        ({"margin": float("nan")}, "--margin is nan"),
        ({"seed": -1}, "--seed is -1; it must not be negative"),
    ],
)
def test_numbers_that_cannot_work(settings, change, message):
    with pytest.raises(IsophaseError, match=message):
        check_settings(settings(**change))
    check_settings(settings())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_tokens": 0}, "--key-tokens is 0: input should be greater"),
        ({"value_tokens": 9}, "--value-tokens is 9"),
        ({"demonstrations": -1}, "--demonstrations is -1"),
        ({"records": 200, "length_tokens": 128}, "Use --length"),
        ({"demonstrations": 8, "records": 8}, "Use --demonstrations 7 or fewer"),
    ],
)
def test_settings_that_a_probe_refuses(settings, change, message):
    with pytest.raises(IsophaseError, match=message):
        make_plan(settings(**change), open_target, pilot=False)


@pytest.mark.parametrize("grouped", [False, True])
def test_batches_cover_every_row_once_in_seeded_order(settings, grouped):
    plan = make_plan(settings(probes=("records", "prefix")), open_target, pilot=False)
    for part in plan.parts:
        order = batches(part, 8, grouped)
        rows = [row for batch in order for row in batch]
        assert sorted(rows) == list(range(part.first_row, part.first_row + part.rows))
        assert rows != sorted(rows)
        assert batches(part, 8, grouped) == order
        other = part.model_copy(update={"probe": part.probe.model_copy(update={"seed": 1})})
        assert batches(other, 8, grouped) != order
        if grouped:
            assert all(len({(row - part.first_row) // 8 for row in batch}) == 1 for batch in order)
            assert all(len(batch) == 8 for batch in order)
        else:
            assert all(len(batch) == 1 for batch in order)
    first, second = (batches(part, 8, grouped) for part in plan.parts)
    assert first != [[row - plan.parts[1].first_row for row in batch] for batch in second]


def test_control(settings):
    asked = settings("a")

    def parts(control, default=None, targets=("a",)):
        a = Configured(defaults=TargetDefaults(records=8, length_tokens=128, control=default))
        made = plan_of(
            asked.model_copy(update={"control": control, "targets": targets}),
            a=a,
            b=Configured(),
            c=Configured(),
        )
        return [(part.role, part.target) for part in made.parts]

    assert parts(None) == [("target", "a")]
    assert parts(None, default="c") == [("target", "a"), ("control", "c")]
    assert parts("none", default="c") == [("target", "a")]
    assert parts("b", default="c") == [("target", "a"), ("control", "b")]
    assert parts("a") == [("target", "a")]
    assert parts(None, default="b", targets=("a", "b")) == [("target", "a"), ("target", "b")]


def test_all_models_of_a_run_get_the_same_items(settings):
    a = Configured(defaults=TargetDefaults(records=5, length_tokens=200, items=6))
    plan = plan_of(settings("a", control="b", items=None), a=a, b=Configured())
    assert plan.parts[0].probe == plan.parts[1].probe
    assert (plan.parts[0].probe.records, plan.parts[0].probe.items) == (5, 6)
    assert [part.first_row for part in plan.parts] == [0, 48]
    assert plan.rows == 96
    assert plan.part_of(47) == plan.parts[0]
    assert plan.part_of(48) == plan.parts[1]
    for row in (-1, 96):
        with pytest.raises(IndexError):
            plan.part_of(row)


@pytest.mark.parametrize(
    ("stride", "grids", "window", "expected"),
    [
        ("auto", [], None, (None, "scan", 24)),
        ("scan", [8], None, (None, "scan", 24)),
        ("auto", [8], None, (8, "configuration", 24)),
        ("auto", [16, 4], None, (16, "configuration", 32)),
        ("auto", [64], None, (64, "configuration", 64)),
        (5, [8], None, (5, "given", 25)),
        (5, [], 40, (5, "given", 40)),
    ],
)
def test_stride_and_window(settings, stride, grids, window, expected):
    target = Configured(
        grids=[Grid(stride_tokens=s, kind="payload", setting="s") for s in grids],
        defaults=TargetDefaults(records=4, length_tokens=512),
    )
    (part,) = plan_of(settings("a", stride=stride, window_tokens=window), a=target).parts
    assert (part.stride_tokens, part.stride_source, part.probe.window_tokens) == expected


def test_stride_of_the_configuration_must_fit_the_window(settings):
    grid = Grid(stride_tokens=16, kind="payload", setting="s")
    coarse = Configured(grids=[grid], defaults=TargetDefaults(records=4, length_tokens=512))
    with pytest.raises(IsophaseError, match=r"the stride of a is 16 tokens.*Give --window 16 or more"):
        plan_of(settings("a", window_tokens=8), a=coarse)
    # The first target chooses the window; it must do for the others too.
    with pytest.raises(IsophaseError, match=r"the stride of a is 16 tokens.*window of 8"):
        plan_of(settings("b", control="a", window_tokens=8), a=coarse, b=Configured(grids=[]))


class Forgetful(PlantedTarget):
    """Its accuracy falls with the number of records."""

    by_records: ClassVar[dict[int, float]] = {}
    fails = False

    @property
    def defaults(self):
        return TargetDefaults(length_tokens=1024)

    def answer(self, prompts):
        for number, prompt in enumerate(prompts):
            keys = {id_ for id_ in prompt.ids.tolist() if self.tokenizer.decode([id_]) in KEYS}
            share = self.by_records[len(keys)]
            right = number < round(share * len(prompts))
            status = "error" if self.fails and not right else "ok"
            yield Answer(status=status, correct=right, log_probability=-1.0)


@pytest.fixture(autouse=True)
def _keys():
    from isophase.probes import lexicon

    KEYS.update(lexicon.KEYS)


KEYS: set[str] = set()


def pilot_of(settings, by_records, **changes):
    target = Forgetful()
    object.__setattr__(target, "by_records", by_records)
    object.__setattr__(target, "fails", changes.pop("fails", False))
    return plan_of(settings("a", window_tokens=24, **changes), pilot=True, a=target).parts[0]


@pytest.mark.parametrize(
    ("accuracies", "records", "tried"),
    [
        ([22 / 24, 1, 1, 1, 1, 1, 1], 128, 1),
        ([0, 0.25, 0.5, 22 / 24, 1, 1, 1], 16, 4),
        ([0, 0, 0, 0, 0, 0.25, 0.875], 2, 7),
        ([0, 0, 0, 0.5, 0.25, 0, 0], 16, 7),  # nothing reaches the aim: the best
        ([0, 0, 0, 0, 0, 0, 0], 2, 7),  # nothing at all: the easiest
    ],
)
def test_pilot_picks_records_in_the_aim(settings, accuracies, records, tried):
    by_records = dict(zip((128, 64, 32, 16, 8, 4, 2), accuracies, strict=True))
    part = pilot_of(settings, by_records)
    assert part.probe.records == records
    assert part.pilot_accuracy == {str(r): by_records[r] for r in list(by_records)[:tried]}


def test_pilot_errors_are_not_misses(settings):
    part = pilot_of(settings, dict.fromkeys((128, 64, 32, 16, 8, 4, 2), 0.25), fails=True)
    assert part.pilot_accuracy == {"128": 1.0}


def test_pilot_skips_what_does_not_fit_and_is_not_needed_where_records_are_known(settings):
    by_records = dict.fromkeys((128, 64, 32, 16, 8, 4, 2), 1.0)
    assert pilot_of(settings, by_records, length_tokens=128).probe.records == 32
    part = pilot_of(settings, {}, records=4)
    assert (part.probe.records, part.pilot_accuracy) == (4, {})


def test_a_resumed_run_does_not_repeat_the_pilot(tmp_path, settings):
    target = Forgetful()
    object.__setattr__(target, "by_records", dict.fromkeys((128, 64, 32, 16, 8, 4, 2), 1.0))
    chosen = settings("a", items=2)
    plan = plan_for(chosen, tmp_path / "run", lambda spec: target)
    assert plan.parts[0].pilot_accuracy
    run_plan(plan, tmp_path / "run", lambda spec: target)
    (tmp_path / "run" / "manifest.json").unlink()
    assert plan_for(chosen, tmp_path / "run", lambda spec: Silent()) == plan


def test_planning_asks_nothing(settings):
    for probe in ("records", "prefix", "in-sequence"):
        plan = plan_of(settings("a", control="b", probes=(probe,)), a=Silent(), b=Silent())
        assert outlook(plan.parts[0], Silent().tokenizer).prompts == 64
    silent = Configured(defaults=TargetDefaults(length_tokens=512))
    plan = plan_of(settings("a"), a=silent)
    assert plan.parts[0].probe.records == 16
    assert needs_pilot(settings("a"), lambda spec: silent)
    assert not needs_pilot(settings("a", records=4), lambda spec: silent)
    assert not needs_pilot(settings("a"), lambda spec: Silent())


def test_outlook(settings):
    plan = make_plan(settings(stride="scan", window_tokens=24, length_tokens=300), open_target, pilot=False)
    view = outlook(plan.parts[0], PlantedTarget().tokenizer)
    assert (view.prompts, view.tokens, view.items, view.window_tokens) == (192, 192 * 300, 8, 24)
    assert view.residues == {2: 24, 3: 24, 4: 24, 5: 20, 6: 24, 7: 21, 8: 24, 12: 24}
    more = plan.parts[0].model_copy(update={"rows": 1920})
    assert outlook(more, PlantedTarget().tokenizer).detectable_amplitude < view.detectable_amplitude


def test_same_settings_same_plan_and_it_round_trips(settings):
    plan = make_plan(settings(), open_target, pilot=False)
    assert make_plan(settings(), open_target, pilot=False) == plan
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_default_folder(settings):
    opener = cache(open_target)
    here = default_folder(settings(), opener)
    assert here == default_folder(settings(), opener)
    assert here.parts[0] == "isophase-runs"
    assert here.name.startswith("planted-period-8")
    assert default_folder(settings(seed=1), opener) != here
    assert default_folder(settings(), lambda spec: PlantedTarget(period=4)) != here


LONG = '''
import json, re, resource, sys
from functools import cache
from pathlib import Path
from isophase.audit.plan import make_plan
from isophase.audit.run import run_plan
from isophase.audit.settings import AuditSettings
from isophase.targets.base import Answer
from isophase.targets.planted import PlantedTarget

class Words:
    """One id per word, digit or sign, made up on first sight; spells anything."""
    prefix_ids = ()
    def __init__(self):
        self.ids, self.words = {}, []
    def encode(self, text):
        return [self.id_of(w) for w in re.findall(r" ?[A-Za-z]+|.", text, re.S)]
    def id_of(self, word):
        if word not in self.ids:
            self.ids[word] = len(self.words)
            self.words.append(word)
        return self.ids[word]
    def decode(self, ids):
        return "".join(self.words[i] for i in ids)

class Reader(PlantedTarget):
    grouped = True
    tokenizer = Words()
    def answer(self, prompts):
        for prompt in prompts:
            counted.append(len(prompt.ids))
            yield Answer(status="ok", correct=bool(prompt.ids[0] >= 0), log_probability=-1.0)

counted = []
opener = cache(lambda spec: Reader())
settings = AuditSettings(targets=("planted:",), control="none", items=256, window_tokens=8, records=16_000,
                         length_tokens=131_072, style="compact", key_tokens=2)
plan = make_plan(settings, opener, pilot=False)
run_plan(plan, Path(sys.argv[1]), opener)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"rows": plan.rows, "prompts": len(counted), "tokens": sum(counted), "peak_bytes": peak}))
'''


def test_long_prompts_are_built_in_a_stream(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LONG, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rows"] == found["prompts"] == 2048
    assert found["tokens"] == 2048 * 131_072
    assert found["peak_bytes"] < 2**30
