"""Every fault that a user can mend: one line with the remedy, exit code 2, no traceback."""

from __future__ import annotations

import json
import subprocess

import pytest

from isophase.errors import EXIT_USAGE

EFFECT = "planted:period=8,amplitude=.25,accuracy=.7"
SMALL = ("--items", 8, "--window", 8)


def refused(done, *parts):
    assert done.code == EXIT_USAGE, done
    assert done.out == ""
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("isophase: ")
    assert "Traceback" not in done.err
    for part in parts:
        assert part in done.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["audit", "gpt"],
            [
                "unknown target 'gpt'",
                "A target is isophase:NAME, hf:PATH_OR_ID, http://HOST:PORT/v1#MODEL or planted:SETTINGS",
            ],
        ),
        (["audit", "isophase:"], ["unknown target 'isophase:'"]),
        (["audit", "isophase:nothing"], ["no bundled model 'nothing'", "The bundled models are"]),
        (
            ["audit", "hf:/does/not/exist"],
            ["'/does/not/exist' does not exist", "Give a folder with config.json"],
        ),
        (["audit", "hf:./missing"], ["'./missing' does not exist"]),
        (["audit", "planted:colour=red"], ["cannot read 'colour=red'"]),
        (["audit", "planted:period=1"], ["period=1 is out of range"]),
        (["audit", "planted:", "planted:"], ["same target is named twice"]),
        (["audit", "planted:", "--control", "gpt"], ["unknown target 'gpt'"]),
        (
            ["audit", "planted:", "--items", "0"],
            ["--items is 0; it must be at least 2", "Give --items 2 or more"],
        ),
        (["audit", "planted:", "--records", "0"], ["--records is 0"]),
        (["audit", "planted:", "--length", "5"], ["--length is 5"]),
        (["audit", "planted:", "--length", "30"], ["Use --length"]),
        (["audit", "planted:", "--seed", "-1"], ["--seed is -1; it must not be negative"]),
        (
            ["audit", "planted:", "--stride", "abc"],
            ["--stride is 'abc'", "Give auto, scan or a number of tokens"],
        ),
        (["audit", "planted:", "--stride", "-4"], ["--stride is '-4'"]),
        (["audit", "planted:", "--stride", "1"], ["--stride is 1; it must be at least 2"]),
        (
            ["audit", "planted:", "--stride", "16", "--window", "8"],
            ["larger than the window of 8", "--window 16"],
        ),
        (
            ["audit", "planted:period=16", "--window", "8"],
            ["is 16 tokens, larger than", "--window 16 or more"],
        ),
        (["audit", "planted:", "--probe", "foo"], ["--probe 'foo' is unknown", "Give records, prefix"]),
        (["audit", "planted:", "--probe", ""], ["--probe '' is unknown"]),
        (["audit", "planted:", "--probe", "records,foo"], ["--probe 'foo' is unknown"]),
        (["audit", "planted:", "--style", "rhyme"], ["--style 'rhyme' is unknown"]),
        (["audit", "planted:", "--margin", "1"], ["--margin is 1.0"]),
        (["audit", "planted:", "--key-tokens", "0"], ["--key-tokens is 0"]),
        (["audit", "planted:", "--demonstrations", "-1"], ["--demonstrations is -1"]),
        (["audit", "planted:", "--probe", "completion"], ["cannot spell '8'", "Use --probe records"]),
        (["plan", "gpt"], ["unknown target"]),
        (["plan", "planted:", "--items", "1"], ["--items is 1"]),
        (["report", "missing"], ["'missing' is not a run folder: it has no plan.json"]),
        (["show", "missing"], ["not a run folder"]),
        (["compare", "missing", "missing"], ["not a run folder"]),
        (["train", "missing.yaml"], ["missing.yaml"]),
    ],
)
def test_one_line(isophase, tmp_path, arguments, parts):
    refused(isophase(*arguments), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["audit", "planted:", "--items", "many"], "Invalid value for '--items'"),
        (["audit", "planted:", "--unknown"], "No such option"),
        (["audit", "planted:", "--seed"], "--seed"),
        (["sing"], "No such command 'sing'"),
        (["report"], "Missing argument"),
        (["compare", "one"], "Missing argument"),
        (["show", "run", "--row", "x"], "Invalid value for '--row'"),
    ],
)
def test_usage_errors_of_the_parser(isophase, arguments, part):
    done = isophase(*arguments)
    assert done.code == EXIT_USAGE
    assert part in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_run_folders_that_cannot_be_used(isophase, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/run", "/proc/run"):
        refused(isophase("audit", EFFECT, *SMALL, "--out", place), "cannot write to", "Choose another --out")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("dear")
    refused(isophase("audit", EFFECT, *SMALL, "--out", "foreign"), "not a run folder (it holds 'thesis.tex')")
    assert [p.name for p in (tmp_path / "foreign").iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    for command in ("report", "show"):
        refused(isophase(command, "empty"), "'empty' is not a run folder", "Give the folder that `isophase audit`")


def test_run_folder_of_another_command_or_newer_schema(isophase, tmp_path):
    isophase("audit", EFFECT, *SMALL, "--out", "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    refused(
        isophase("audit", EFFECT, *SMALL, "--seed", 1, "--out", "run"),
        "another plan (seed is 0 there and 1 here)",
    )
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before
    plan = json.loads(before["plan.json"])
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan | {"schema_version": 99}))
    for arguments in (
        ("audit", EFFECT, *SMALL, "--out", "run"),
        ("report", "run"),
        ("show", "run"),
        ("compare", "run", "run"),
    ):
        refused(isophase(*arguments), "schema version 99; this isophase reads up to 1. Upgrade isophase.")
    (tmp_path / "run" / "plan.json").write_text(json.dumps(plan | {"isophase_version": "0.0.0"}))
    refused(isophase("audit", EFFECT, *SMALL, "--out", "run"), "of isophase 0.0.0")


def test_incomplete_and_damaged_runs(isophase, tmp_path):
    isophase("audit", EFFECT, *SMALL, "--out", "run")
    run = tmp_path / "run"
    manifest, answers = (run / "manifest.json").read_bytes(), (run / "answers.jsonl").read_bytes()
    (run / "answers.jsonl").write_bytes(answers[:1000])
    refused(isophase("report", "run"), "answers are missing from a complete run")
    (run / "manifest.json").unlink()
    refused(isophase("report", "run"), "not complete", "Repeat the `isophase audit` command that began it")
    (run / "answers.jsonl").write_bytes(answers[:300] + b"{" + answers[300:])
    refused(isophase("audit", EFFECT, *SMALL, "--out", "run"), "is damaged")
    (run / "answers.jsonl").write_bytes(answers)
    for damage in (b"{}", b"{", b"[1]", b"\xff"):
        (run / "manifest.json").write_bytes(damage)
        refused(isophase("report", "run"), "manifest.json")
    (run / "manifest.json").write_bytes(manifest)
    assert isophase("report", "run").code == 0


@pytest.mark.parametrize("row", [-1, 64, 999999])
def test_show_a_row_that_does_not_exist(isophase, row):
    isophase("audit", EFFECT, *SMALL, "--out", "run")
    refused(isophase("show", "run", "--row", row), f"--row is {row}; this run has rows 0 to 63")


def test_json_file_that_cannot_be_written_loses_nothing(isophase, tmp_path):
    (tmp_path / "file").write_text("")
    done = isophase("audit", EFFECT, *SMALL, "--out", "run", "--json", "file/report.json")
    refused(done, "cannot write 'file/report.json': Not a directory", "Choose another --json file")
    assert (tmp_path / "run" / "report.html").exists()
    refused(isophase("plan", EFFECT, "--json", tmp_path), "Is a directory")


def test_model_without_the_words(isophase, model_folder):
    few = f"hf:{model_folder(('<pad>', '<eos>', '?', 'the', 'cat'), record_style=None)}"
    refused(isophase("audit", few, "--length", 200), "this tokenizer has 1")
    some = ("<pad>", "<eos>", "?", "the", "cat", "red")
    refused(isophase("plan", f"hf:{model_folder(some)}", "--length", 200), "single", "tokenizer")


def test_context_longer_than_the_model_reads(isophase, model_folder):
    spec = f"hf:{model_folder()}"
    for command in ("plan", "audit"):
        done = isophase(command, spec, "--length", 1024, "--records", 8)
        refused(done, "prompts of 1024 tokens exceed the 256", "Give --length 256 or less")
    assert isophase("plan", spec, "--length", 256, "--records", 8).code == 0


def test_folder_without_a_model(isophase, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(isophase("audit", "hf:./empty"), "cannot load the configuration of './empty'")
    refused(isophase("audit", "hf:./empty", "--gguf", "x.gguf"), "GGUF file 'x.gguf' is not in './empty'")


def test_full_disk_when_the_report_is_written(isophase, tmp_path):
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("only root may mount")
    try:
        done = isophase("audit", EFFECT, *SMALL, "--out", "disk/run")
        refused(done, "the disk of 'disk/run' is full. Free some space and repeat the command")
        assert sorted(p.name for p in (mount / "run").iterdir()) in (
            ["answers.jsonl", "manifest.json", "plan.json"],
            ["answers.jsonl", "manifest.json", "plan.json", "report.json"],
        )
        refused(isophase("report", "disk/run"), "is full")
        subprocess.run(["mount", "-o", "remount,size=8m", str(mount)], check=True)
        assert isophase("report", "disk/run").code == 0
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_debug_shows_the_traceback(process):
    with process("--debug", "audit", "gpt") as running:
        _, err = running.communicate(timeout=60)
    assert running.returncode == EXIT_USAGE
    assert "Traceback" in err
    assert "IsophaseError: unknown target 'gpt'" in err
