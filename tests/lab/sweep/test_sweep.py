"""A sweep: one folder per run, finished ones skipped, the same tables whichever engine ran it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from isophase.cli.main import main
from isophase.errors import IsophaseError
from isophase.lab.sweep.grid import is_finished, open_folder, read_sweep, run_local, run_one
from isophase.lab.sweep.report import memory_name, write_tables
from isophase.models import TrainingRecord

RECIPES = Path(__file__).parents[3] / "recipes"
QUIET = Console(quiet=True)
TABLES = ("table.json", "table.md", "index.html")
TINY_AUDIT = {"items": 2, "records": 4, "length_tokens": 96, "shifts": 99}


@pytest.fixture
def write_sweep(make_recipe, tmp_path: Path):
    def write(**changes) -> Path:
        recipe = make_recipe().model_dump(mode="json", exclude_defaults=True)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        settings = {
            "name": "tiny",
            "recipe": "recipe.yaml",
            "runs": [
                {"name": "full"},
                {
                    "name": "w4s4",
                    "set": {"model.compression_window": 4, "model.compression_stride": 4},
                    "grid": {"seed": [1, 2]},
                },
            ],
            "audit": TINY_AUDIT,
        }
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump(settings | changes))
        return path

    return write


def tables(sweep, out: Path) -> dict[str, bytes]:
    write_tables(sweep, out, {})
    return {name: (out / name).read_bytes() for name in TABLES}


def test_what_a_sweep_file_says(write_sweep) -> None:
    sweep = read_sweep(write_sweep(grid={"model.local_window": [4, 6]}))
    assert [run.name for run in sweep.runs] == [
        "full-local_window4",
        "full-local_window6",
        "w4s4-local_window4-seed1",
        "w4s4-local_window4-seed2",
        "w4s4-local_window6-seed1",
        "w4s4-local_window6-seed2",
    ]
    last = sweep.runs[-1].recipe
    assert (last.name, last.seed, last.model["local_window"]) == ("w4s4-local_window6-seed2", 2, 6)
    assert last.model["compression_stride"] == 4
    assert "compression_stride" not in sweep.runs[0].recipe.model
    grid_only = read_sweep(write_sweep(runs=[], grid={"seed": [1, 2]}))
    assert [run.name for run in grid_only.runs] == ["tiny-seed1", "tiny-seed2"]


def test_the_sweep_of_strides_is_matched() -> None:
    sweep = read_sweep(RECIPES / "sweeps" / "strides.yaml")
    runs = {run.name: run.recipe for run in sweep.runs}
    assert len(runs) == 12
    for name, recipe in runs.items():
        stride = recipe.model.get("compression_stride")
        assert all(stage.lead % (stride or 1) == 0 for stage in recipe.stages), name
        control = runs["full-lead12" if stride in (6, 12) or name == "full-lead12" else "full"]
        changed = {"name", "seed", "model"} if "seed" in name else {"name", "model"}
        assert recipe.model_dump(exclude=changed) == control.model_dump(exclude=changed)
        extra = {key for key, value in recipe.model.items() if control.model.get(key) != value}
        assert extra <= {"compression_window", "compression_stride", "rotary_dims", "gate"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "none.yaml"}, "none.yaml"),
        ({"runs": [{"name": "a"}, {"name": "a"}]}, "two runs are called 'a'"),
        ({"runs": [{"name": "a", "set": {"seed": -1}}]}, "seed"),
        ({"runs": [{"name": "a", "set": {"seed.x": 1}}]}, "'seed' holds a single value"),
        ({"runs": [{"name": "A b"}]}, "runs.0.name"),
        ({"audit": {"item": 3}}, "audit.item"),
        ({"retries": -1}, "retries"),
    ],
)
def test_bad_sweeps_are_one_line(write_sweep, changes, words) -> None:
    with pytest.raises(IsophaseError, match=words) as caught:
        read_sweep(write_sweep(**changes))
    assert "\n" not in str(caught.value)


def test_a_sweep_is_run_skipped_and_told(write_sweep, tmp_path: Path) -> None:
    grid = {
        "name": "w4s4",
        "set": {"model.compression_window": 4, "model.compression_stride": 4},
        "grid": {"seed": [1]},
    }
    sweep = read_sweep(write_sweep(runs=[{"name": "full"}, grid]))
    out = tmp_path / "out"
    open_folder(sweep, out, resume=False)
    assert run_local(sweep, out, 1, QUIET) == {}
    written = tables(sweep, out)
    table = json.loads(written["table.json"])
    assert [row["run"] for row in table["rows"]] == ["full", "w4s4-seed1"]
    assert [row["stride_tokens"] for row in table["rows"]] == [None, 4]
    assert [row["seed"] for row in table["rows"]] == [5, 1]
    assert (table["missing"], table["failed"]) == ([], {})
    assert written["table.md"].decode().splitlines()[5].startswith("| w4s4-seed1 | 4/4 | 4.00 + 4.0 | 1 | ")
    html = written["index.html"].decode()
    assert html.count("<section>") == 2
    assert "http" not in html.replace("http-equiv", "")
    # Taken up again, nothing is done twice.
    before = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/*/*")}
    with pytest.raises(IsophaseError, match="Add --resume"):
        open_folder(sweep, out, resume=False)
    open_folder(sweep, out, resume=True)
    assert run_local(sweep, out, 1, QUIET) == {}
    assert {p: p.stat().st_mtime_ns for p in out.glob("runs/*/*/*")} == before
    assert tables(sweep, out) == written


def test_one_failed_run_does_not_stop_the_others(write_sweep, tmp_path: Path, monkeypatch, capsys) -> None:
    runs = [{"name": "bad", "set": {"model.compression_window": 4}}, {"name": "good"}]
    out = tmp_path / "out"
    command = ["isophase", "sweep", str(write_sweep(runs=runs)), "--out", str(out)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr()
    assert "1 of 2 runs failed, such as bad: " in said.err
    assert "| good | full |" in said.out
    table = json.loads((out / "table.json").read_text())
    assert [row["run"] for row in table["rows"]] == ["good"]
    assert table["missing"] == ["bad"]
    assert "give both" in table["failed"]["bad"]
    assert "Not finished: bad" in (out / "index.html").read_text()
    # Mended, it goes on; what is there may not change under it.
    monkeypatch.setattr("sys.argv", [*command, "--resume"])
    for change, words in (
        ({"audit": TINY_AUDIT | {"items": 3}}, "other audit settings"),
        ({}, "another recipe (seed is 5 there and 8 here)"),
    ):
        write_sweep(runs=[{"name": "good", "set": {"seed": 8}}], **change)
        with pytest.raises(SystemExit):
            main()
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "stride", "words"),
    [
        ({}, None, "full"),
        ({"sink_tokens": 4}, None, "full"),
        ({}, 8, "8/8"),
        (
            {"grid_shift": "heads", "count_bias": True, "sink_tokens": 4},
            8,
            "8/8, shifted by heads, count bias, 4 sinks",
        ),
        ({"chunk_rule": "local_maximum"}, None, "local_maximum of hash"),
        (
            {"chunk_rule": "threshold", "chunk_score": "cosine", "count_bias": True},
            None,
            "threshold of cosine, count bias",
        ),
    ],
)
def test_a_memory_is_named_by_what_it_is(model, stride, words) -> None:
    record = TrainingRecord.model_construct(window_tokens=stride, stride_tokens=stride)
    assert memory_name(model, record) == words


def test_a_strange_folder_is_refused(write_sweep, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(IsophaseError, match="holds no sweep"):
        open_folder(read_sweep(write_sweep()), tmp_path / "out", resume=True)


EIGHT = {
    "runs": [
        {"name": "full", "grid": {"seed": [1, 2]}},
        {
            "name": "grid",
            "set": {"model.compression_window": 4, "model.compression_stride": 4},
            "grid": {"seed": [1, 2, 3, 4, 5, 6]},
        },
    ]
}


def killing_run_one(run, sweep, out: Path) -> str:
    """Dies once, in the middle of the third run, as by the machine's memory killer."""
    if run.name == "grid-seed1" and not (out / "died").exists():
        (out / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return run_one(run, sweep, out)


@pytest.mark.slow
def test_processes_and_a_killed_worker_change_nothing(write_sweep, tmp_path: Path, monkeypatch) -> None:
    import sys

    import isophase.lab.sweep.grid as module

    sweep = read_sweep(write_sweep(**EIGHT))
    open_folder(sweep, tmp_path / "plain", resume=False)
    assert run_local(sweep, tmp_path / "plain", 1, QUIET) == {}
    open_folder(sweep, tmp_path / "pool", resume=False)
    # Spawned workers import this file by its name.
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_sweep as importable

    assert "test_sweep" in sys.modules
    monkeypatch.setattr(module, "run_one", importable.killing_run_one)
    assert run_local(sweep, tmp_path / "pool", 2, QUIET) == {}
    assert (tmp_path / "pool" / "died").exists()
    assert tables(sweep, tmp_path / "pool") == tables(sweep, tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_with_a_killed_worker_equals_the_local_engine(write_sweep, tmp_path: Path) -> None:
    import threading

    import ray

    from isophase.lab.sweep.cluster import run_on_ray

    sweep = read_sweep(write_sweep(**EIGHT))
    open_folder(sweep, tmp_path / "plain", resume=False)
    assert run_local(sweep, tmp_path / "plain", 1, QUIET) == {}
    open_folder(sweep, tmp_path / "ray", resume=False)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    killed = []

    def kill_one_worker() -> None:
        while not killed and not all(is_finished(run, sweep, tmp_path / "ray") for run in sweep.runs):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    title = (process / "cmdline").read_bytes()
                    parent = (process / "status").read_text()
                except OSError:
                    continue
                if title.startswith(b"ray::_run_one") and "PPid" in parent and list((tmp_path / "ray").glob("runs/*")):
                    os.kill(int(process.name), signal.SIGKILL)
                    killed.append(process.name)
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=kill_one_worker)
    thread.start()
    try:
        assert run_on_ray(sweep, tmp_path / "ray", QUIET) == {}
    finally:
        thread.join()
        ray.shutdown()
    assert killed
    assert tables(sweep, tmp_path / "ray") == tables(sweep, tmp_path / "plain")
