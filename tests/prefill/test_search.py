"""The offline search, its files and commands."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isophase.cli.main import main
from isophase.cli.options import with_variants
from isophase.errors import IsophaseError
from isophase.prefill import BlockSparse, Dense, VerticalSlash, read_patterns, search, sparse_prefill
from isophase.prefill.choose.offline import Offer, spend
from isophase.prefill.picture import draw_densities, head_facts, read_result
from isophase.targets import open_target
from isophase.targets.sparse import SparseTarget

CANDIDATES = (
    VerticalSlash(columns=16, slash_tokens=128), VerticalSlash(columns=64, slash_tokens=256), BlockSparse(windows=3),
)  # fmt: skip


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["isophase", *arguments])
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return int(str(code)), out.out, out.err


def test_the_same_text_and_seed_give_the_same_patterns(make_model, random_ids, tmp_path) -> None:
    model, ids = make_model(), random_ids(900)
    found = search(model, ids, budget=0.5, candidates=CANDIDATES)
    assert found == search(model, ids, budget=0.5, candidates=CANDIDATES)
    assert found.density() <= 0.5
    assert [len(layer) for layer in found.layers] == [6, 6]
    assert model.config._attn_implementation == "sdpa"
    found.save(tmp_path / "patterns.json")
    with torch.inference_mode(), sparse_prefill(model, tmp_path / "patterns.json", threshold_tokens=300) as run:
        model(ids)
    assert run.density() == pytest.approx(found.density(), abs=0.05)
    assert run.recall() == pytest.approx(found.recall(), abs=0.1)


def test_more_budget_buys_more_recall(make_model, random_ids) -> None:
    model, ids = make_model(), random_ids(900)
    recalls = [search(model, ids, budget=b, candidates=CANDIDATES).recall() for b in (0.45, 0.7, 1.0)]
    assert recalls == sorted(recalls)
    assert recalls[-1] == pytest.approx(1.0)


def test_what_cannot_be_searched(make_model, random_ids) -> None:
    model = make_model()
    for ids, budget, message in (
        (random_ids(900), 0.0, "budget is 0.0"), (random_ids(900), 0.01, "less than the smallest patterns cost"),
        (random_ids(300), 0.5, "512 tokens or more"), (random_ids(900, rows=2), 0.5, "give one row"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            search(model, ids, budget=budget, candidates=CANDIDATES)
    with pytest.raises(ValueError, match="sliding window"):
        search(make_model("mistral", window=100), random_ids(900), candidates=CANDIDATES)


costs = st.integers(1, 99).map(lambda n: n / 100)


@given(st.lists(st.lists(st.tuples(costs, costs), min_size=1, max_size=5), min_size=1, max_size=6), st.floats(0.3, 1.0))
def test_the_budget_is_kept_and_no_single_setting_is_better(heads, budget) -> None:
    offers = {
        (0, n): [*(Offer(pattern=Dense(), recall=r, cost=c) for c, r in some), Offer(pattern=Dense(), recall=1, cost=1)]
        for n, some in enumerate(heads)
    }
    try:
        chosen = spend(offers, budget)
    except ValueError:
        return
    cost = sum(o.cost for o in chosen.values()) / len(chosen)
    assert cost <= budget + 1e-9
    # With what a step more would cost, no choice of one offer for each head keeps more.
    biggest = max(o.cost for some in offers.values() for o in some) / len(chosen)
    assert cost >= budget - biggest or all(o.recall >= max(x.recall for x in offers[h]) for h, o in chosen.items())


def test_files_and_pictures(make_model, random_ids, tmp_path) -> None:
    model, ids = make_model(), random_ids(900)
    with torch.inference_mode(), sparse_prefill(model, CANDIDATES[0], threshold_tokens=300) as done:
        model(ids)
    done.save(tmp_path / "run.json")
    assert read_result(tmp_path / "run.json") == done
    assert len(head_facts(done)) == 12
    picture = draw_densities(done, title="a < b")
    assert picture.startswith("<svg")
    assert "a &lt; b" in picture
    assert picture.count("<g>") == 12
    (tmp_path / "bad.json").write_text('{"kind": "else"}')
    with pytest.raises(IsophaseError, match="neither patterns nor a run"):
        read_result(tmp_path / "bad.json")
    with pytest.raises(IsophaseError, match="holds no patterns"):
        read_patterns(tmp_path / "bad.json")
    with pytest.raises(IsophaseError, match="Make them with isophase prefill search"):
        read_patterns(tmp_path / "missing.json")


def test_commands(folder, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("The river runs past the old mill and under a bridge of stone. " * 60)
    command = ["prefill", "search", f"hf:{folder}", "--text", "text.txt", "--tokens", "512"]
    code, out, err = run(monkeypatch, capsys, *command, "--budget", "0.9")
    assert code == 0, err
    assert "Patterns: patterns.json" in out
    written = (tmp_path / "patterns.json").read_bytes()
    run(monkeypatch, capsys, *command, "--budget", "0.9")
    assert (tmp_path / "patterns.json").read_bytes() == written
    code, out, err = run(monkeypatch, capsys, "prefill", "show", "patterns.json")
    assert code == 0, err
    assert "Picture: patterns.svg" in out
    assert (tmp_path / "patterns.svg").read_text().startswith("<svg")
    target = open_target(f"hf:{folder}|prefill({tmp_path / 'patterns.json'})")
    assert isinstance(target, SparseTarget)
    for arguments, message in (
        (["--tokens", "100000"], "--tokens is 100000; the model reads 512"),
        (["--budget", "2"], "budget is 2.0; give a share"),
        (["--text", "none.txt"], "cannot read the text 'none.txt'"),
        (["--out", "no/where.json"], "the folder of 'no/where.json' does not exist"),
    ):
        code, _, err = run(monkeypatch, capsys, *command, *arguments)
        assert (code, err.count("\n")) == (2, 1), err
        assert message in err
    code, _, err = run(monkeypatch, capsys, "prefill", "show", "text.txt")
    assert (code, err.count("\n")) == (2, 1), err


def test_audits_read_sparsely(folder, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = ["block_sparse(windows=1, window_tokens=16, overlap=1)", "auto"]
    command = ["audit", f"hf:{folder}", "--prefill", kinds[0], "--prefill", kinds[1], "--items", "2", "--records", "3"]
    command += ["--length", "400", "--demonstrations", "0", "--style", "sentences", "--window", "16", "--out", "run"]
    code, out, err = run(monkeypatch, capsys, *command, "--json", "-")
    assert code in (0, 10, 11), err
    findings = json.loads(out)["findings"]
    assert [f["target"] for f in findings] == [f"hf:{folder}|prefill({kind})" for kind in kinds]
    assert findings[0]["stride_tokens"] == 16
    code, _, err = run(monkeypatch, capsys, "audit", f"hf:{folder}", "--prefill", "tri_shape()", "--out", "x")
    assert (code, err.count("\n")) == (2, 1), err
    with pytest.raises(IsophaseError, match="--cache and --prefill are given together"):
        with_variants(["hf:a"], ["full"], None, ["auto"])
    with pytest.raises(IsophaseError, match="--prefill is for hf: targets, and none is given"):
        with_variants(["planted:period=4"], None, None, ["auto"])
