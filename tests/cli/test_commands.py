from __future__ import annotations

import json
import signal
import time

import pytest

from isophase import __version__
from isophase.audit.schema import Report
from isophase.errors import EXIT_INCONCLUSIVE, EXIT_INTERRUPTED, EXIT_NONE, EXIT_SENSITIVE
from isophase.targets.planted import PlantedTarget

COMMANDS = (
    "audit",
    "check",
    "invariants",
    "plan",
    "report",
    "compare",
    "show",
    "models",
    "train",
    "sweep",
    "explain",
    "repair",
)
EFFECT = "planted:period=8,amplitude=.25,accuracy=.7"
NULL = "planted:amplitude=0,accuracy=.7,seed=6"
SMALL = ("--items", 16, "--window", 8)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(isophase, command):
    done = isophase(command, "--help")
    assert done.code == 0
    assert f"{command} [OPTIONS]" in done.out
    assert "Traceback" not in done.err


def test_help_lists_every_command_and_version(isophase):
    done = isophase("--help")
    assert done.code == 0
    assert all(f"\n  {command} " in done.out for command in COMMANDS)
    assert isophase("--version") == (0, f"isophase {__version__}\n", "")
    bare = isophase()
    assert "Commands:" in bare.out + bare.err


@pytest.mark.parametrize(
    ("target", "options", "code"),
    [
        (EFFECT, SMALL, EXIT_SENSITIVE),
        ("planted:amplitude=0,accuracy=.97", ("--items", 64, "--margin", ".1", "--stride", 8), EXIT_NONE),
        (NULL, SMALL, EXIT_INCONCLUSIVE),
        ("planted:amplitude=0,accuracy=0", SMALL, EXIT_INCONCLUSIVE),
    ],
)
def test_audit_exit_codes(isophase, tmp_path, target, options, code):
    done = isophase("audit", target, *options, "--out", "run")
    assert (done.code, done.err) == (code, "")
    assert done.out.endswith("Report: run/report.html\n")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"plan.json", "answers.jsonl", "manifest.json", "report.json", "report.html"}


def test_one_sensitive_target_decides_the_exit_code(isophase):
    done = isophase("audit", NULL, EFFECT, *SMALL, "--out", "run")
    assert done.code == EXIT_SENSITIVE
    assert "Of 2 tests, 1 is sensitive to the phase, 1 is inconclusive." in " ".join(done.out.split())


def test_default_folder_and_repetition(isophase, tmp_path):
    first = isophase("audit", EFFECT, *SMALL)
    (folder,) = (tmp_path / "isophase-runs").iterdir()
    answered = (folder / "answers.jsonl").stat().st_mtime_ns
    again = isophase("audit", EFFECT, *SMALL)
    assert again == first
    assert (folder / "answers.jsonl").stat().st_mtime_ns == answered
    isophase("audit", EFFECT, *SMALL, "--seed", 1)
    assert len(list((tmp_path / "isophase-runs").iterdir())) == 2


def test_demo(isophase):
    done = isophase("audit", "--demo", "--out", "run")
    assert done.code == EXIT_SENSITIVE
    assert "accuracy repeats every 8 tokens" in " ".join(done.out.split())
    refused = isophase("audit", EFFECT, "--demo")
    assert refused.code == 2
    assert "--demo brings its own target" in refused.err


def test_json_on_standard_output_is_alone_there(isophase):
    audit = isophase("audit", EFFECT, *SMALL, "--out", "run", "--json", "-")
    report = json.loads(audit.out)
    assert Report.model_validate(report)
    assert report["verdict"] == "sensitive"
    assert "Report: run/report.html" in audit.err
    isophase("audit", NULL, *SMALL, "--out", "other")
    for command, word in (
        (("report", "run"), "SENSITIVE"),
        (("plan", EFFECT), "Detectable amplitude"),
        (("compare", "run", "other"), "by phase"),
        (("show", "run"), "answer_text"),
        (("models",), "Accuracy:"),
    ):
        done = isophase(*command, "--json", "-")
        assert done.code == 0
        json.loads(done.out)
        assert word in done.err


def test_json_to_a_file_comes_beside_the_text(isophase, tmp_path):
    audit = isophase("audit", EFFECT, *SMALL, "--out", "run", "--json", "out.json")
    assert "SENSITIVE" in audit.out
    assert (tmp_path / "out.json").read_text() == (tmp_path / "run" / "report.json").read_text()
    isophase("audit", NULL, *SMALL, "--out", "other")
    for command in (
        ("report", "run"),
        ("plan", EFFECT),
        ("compare", "run", "other"),
        ("show", "run"),
        ("models",),
    ):
        path = tmp_path / f"{command[0]}.json"
        done = isophase(*command, "--json", path)
        assert done.code == 0
        assert done.out
        json.loads(path.read_text())


def test_json_into_a_device_or_link_does_not_replace_it(isophase, tmp_path):
    import os
    import threading

    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    assert isophase("plan", EFFECT, "--json", "pipe").code == 0
    reader.join(10)
    assert (tmp_path / "pipe").is_fifo()
    assert json.loads(read[0])["settings"]["targets"] == [EFFECT]
    (tmp_path / "link").symlink_to(tmp_path / "real.json")
    assert isophase("plan", EFFECT, "--json", "link").code == 0
    assert (tmp_path / "link").is_symlink()
    json.loads((tmp_path / "real.json").read_text())


def test_report_writes_the_same_bytes_again(isophase, tmp_path):
    audit = isophase("audit", EFFECT, *SMALL, "--out", "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    for name in ("report.json", "report.html"):
        (tmp_path / "run" / name).unlink()
    report = isophase("report", "run")
    assert (report.code, report.out) == (0, audit.out)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_show_rebuilds_the_prompt_that_was_asked(isophase, monkeypatch):
    asked = {}
    plain = PlantedTarget._answer

    def remember(self, prompt):
        asked[self.seed, prompt.item, prompt.column] = prompt.ids.tolist()
        return plain(self, prompt)

    monkeypatch.setattr(PlantedTarget, "_answer", remember)
    isophase(
        "audit",
        EFFECT,
        "--control",
        NULL,
        "--items",
        3,
        "--window",
        8,
        "--probe",
        "in-sequence",
        "--out",
        "run",
    )
    assert len(asked) == 48
    for row in (0, 7, 23, 24, 47):
        shown = json.loads(isophase("show", "run", "--row", row, "--json", "-").out)
        seed = 0 if row < 24 else 6
        assert shown["ids"] == asked[seed, shown["item"], shown["column"]]
        assert (shown["item"], shown["column"]) == divmod(row % 24, 8)
        assert shown["target"] == (EFFECT if row < 24 else NULL)
        assert shown["status"] == "ok"
        words = shown["text"].split()
        assert len(words) == shown["tokens"] == len(shown["ids"])
        at = shown["position_tokens"]
        assert words[at] == words[-1]  # the key that is asked for
        assert words[at + 1] == shown["answer_text"]
    text = isophase("show", "run", "--row", 7).out
    assert "answer_text: '" in text
    assert "phase: " in text


def test_show_before_anything_was_asked(isophase, tmp_path):
    isophase("audit", EFFECT, *SMALL, "--out", "run")
    (tmp_path / "run" / "answers.jsonl").unlink()
    done = isophase("show", "run")
    assert "status: not asked yet" in done.out


def test_plan_says_what_would_be_asked(isophase, model_folder):
    done = isophase("plan", EFFECT, "--items", 10, "--length", 300)
    text = " ".join(done.out.split())
    assert "240" in text
    assert "72,000" in text
    assert "records: 10 items x 24 positions, 300 tokens, 8 records each." in text
    assert "every residue equally often): 8 (24)." in text
    assert "No --records given" not in text
    piloted = isophase("plan", f"hf:{model_folder()}", "--length", 200)
    assert piloted.code == 0
    assert "No --records given: the audit asks a few questions first" in " ".join(piloted.out.split())


def test_compare(isophase):
    isophase("audit", EFFECT, *SMALL, "--out", "a")
    isophase("audit", NULL, *SMALL, "--out", "b")
    done = isophase("compare", "a", "b")
    assert done.code == 0
    assert done.out.startswith(f"{EFFECT} and {NULL} differ in how accuracy depends on the phase")
    assert len(done.out.splitlines()) == 6


def test_completion_probe_that_does_not_apply(isophase, model_folder):
    spec = f"hf:{model_folder(weights=True)}"
    alone = isophase("audit", spec, "--probe", "completion", "--out", "run")
    assert alone.code == 2
    assert alone.err.startswith("isophase: The completion probe does not apply: this tokenizer cannot spell '8'")
    small = ("--items", 2, "--records", 4, "--length", 120, "--window", 8)
    every = isophase("audit", spec, "--probe", "all", *small, "--out", "run", "--json", "-")
    report = json.loads(every.out)
    assert every.code in (EXIT_NONE, EXIT_SENSITIVE, EXIT_INCONCLUSIVE)
    assert {finding["probe"] for finding in report["findings"]} == {"records", "prefix", "in-sequence"}
    assert any(note.startswith(f"completion on {spec} was left out") for note in report["notes"])


def test_output_into_a_closed_pipe(process, isophase):
    isophase("audit", EFFECT, *SMALL, "--out", "run")
    for arguments in (("report", "run"), ("report", "run", "--json", "-"), ("show", "run"), ("--help",)):
        running = process(*arguments)
        running.stdout.close()
        _, err = running.communicate(timeout=60)
        assert "Traceback" not in err
        assert "Exception" not in err
        assert running.returncode in (0, 1)


def test_interrupt_says_how_to_go_on(process, tmp_path):
    running = process("audit", "planted:", "--items", 3000, "--out", "run")
    answers = tmp_path / "run" / "answers.jsonl"
    deadline = time.monotonic() + 60
    while not (answers.exists() and answers.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == EXIT_INTERRUPTED
    assert err == "isophase: interrupted; an audit resumes when its command is repeated.\n"
    assert answers.read_bytes().endswith(b"\n")
