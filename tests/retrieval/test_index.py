"""Indexes on disk: resume, broken input, search, export, and the commands."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from isophase.chunking.rules import FixedStride
from isophase.cli.main import main
from isophase.errors import IsophaseError
from isophase.retrieval import Encoder, LateChunker
from isophase.retrieval.index.documents import list_files, read_document
from isophase.retrieval.index.search import Index
from isophase.retrieval.index.tables import IndexWriter, build_index
from isophase.retrieval.late import chunker as late

WORDS = [
    "the",
    "chunk",
    "starts",
    "where",
    "text",
    "says",
    "so",
    "nothing",
    "else",
    "decides",
    "token",
    "lost",
    "what",
    "late",
    "reads",
    "whole",
    "document",
    "cuts",
]


def write_documents(folder: Path, count: int, seed: int = 0) -> Path:
    rng = random.Random(seed)
    folder.mkdir()
    for n in range(count):
        (folder / f"{n:03}.txt").write_text(" ".join(rng.choices(WORDS, k=rng.randint(1, 120))) + ".\n")
    return folder


def write_broken(folder: Path) -> dict[str, str]:
    """Files that are no text, and the word that each is refused with."""
    folder.mkdir(exist_ok=True)
    broken = {
        "empty.txt": (b"", "is empty"),
        "blank.txt": (b" \n\t\n", "is empty"),
        "line.txt": (b"a " * 5_000_000, "has a line of 10000000 characters"),
        "nul.txt": (b"text \0 more", "NUL byte at 5"),
        "latin.txt": ("naïve".encode("latin-1"), "is not UTF-8 (byte 2)"),
        "utf16.txt": ("text".encode("utf-16"), "is UTF-16"),
        "paper.txt": (b"%PDF-1.7\n...", "is a PDF"),
        "office.txt": (b"PK\x03\x04...", "ZIP"),
        "invisible.txt": ("\u200b\u200b".encode(), "has no tokens"),
    }
    for name, (data, _) in broken.items():
        (folder / name).write_bytes(data)
    return {str(folder / name): words for name, (_, words) in broken.items()}


@pytest.fixture(scope="module")
def encoder(model_folder: Path) -> Encoder:
    return Encoder(str(model_folder))


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISOPHASE_DEBUG", raising=False)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isophase", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def rows(folder: Path) -> list[dict]:
    return [row for table in Index(folder).rows() for row in table.to_pylist()]


@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_any_instant_it_ends_as_the_same_index(model_folder: Path, tmp_path: Path, kills: int) -> None:
    docs = write_documents(tmp_path / "docs", 24)
    write_broken(docs)
    script = Path(__file__).with_name("embedding.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(model_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout

        def embed(folder: Path, milliseconds: int, kill_after: float | None) -> tuple[int, float]:
            """Wait status, and seconds since everything was loaded."""
            assert process.stdin
            assert process.stdout
            process.stdin.write(f"{folder} {docs} {milliseconds}\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            began = time.monotonic()
            if kill_after is not None:
                time.sleep(kill_after)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            return int(process.stdout.readline()), time.monotonic() - began

        status, took = embed(tmp_path / "calm", 20, None)
        assert status == 0
        rng = random.Random(5)
        killed = 0
        # Early kills hit the making of the folder, late ones compaction; those between, groups.
        for attempt in range(kills):
            status, _ = embed(tmp_path / "killed", 20, rng.uniform(0, 0.1 if attempt < 2 else took / 2))
            killed += os.WIFSIGNALED(status)
            if not os.WIFSIGNALED(status):
                # It got through between kills: the next ones are for another.
                same_index(tmp_path / "killed", tmp_path / "calm")
                shutil.rmtree(tmp_path / "killed")
        assert killed >= kills // 2
        assert embed(tmp_path / "killed", 0, None)[0] == 0
        process.stdin.close()
    same_index(tmp_path / "killed", tmp_path / "calm")


def same_index(found: Path, expected: Path) -> None:
    assert rows(found) == rows(expected)
    for name in ("index.json", "complete.json"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()


def test_a_group_without_its_documents_is_written_again(encoder: Encoder, tmp_path: Path, monkeypatch) -> None:
    """Killed between the two commits of a group: its chunks are there, its documents are not."""
    files = list_files([write_documents(tmp_path / "docs", 6)])
    monkeypatch.setattr(late, "_GROUP_DOCUMENTS", 2)
    chunker = LateChunker(encoder, rule=FixedStride(stride_tokens=8))
    build_index(tmp_path / "calm", chunker, "fixed(8)", files)

    class Killed(BaseException):
        pass

    inner = IndexWriter.add

    def half(self: IndexWriter, documents, chunks) -> None:
        if self.done == 2:
            monkeypatch.setattr(self, "_documents", None)

        try:
            inner(self, documents, chunks)
        except AttributeError:
            raise Killed from None

    monkeypatch.setattr(IndexWriter, "add", half)
    with pytest.raises(Killed):
        build_index(tmp_path / "killed", chunker, "fixed(8)", files)
    monkeypatch.setattr(IndexWriter, "add", inner)
    with pytest.raises(IsophaseError, match="not complete"):
        Index(tmp_path / "killed")
    build_index(tmp_path / "killed", chunker, "fixed(8)", files)
    assert rows(tmp_path / "killed") == rows(tmp_path / "calm")


def test_broken_files_are_named_skipped_and_counted(model_folder: Path, tmp_path: Path, call) -> None:
    docs = write_documents(tmp_path / "docs", 3)
    broken = write_broken(docs)
    code, out, err = call("embed", docs, "--model", model_folder, "--out", "index", "--rule", "fixed(8)")
    assert code == 0
    assert f"3 documents, {len(rows(tmp_path / 'index'))} vectors; {len(broken)} files skipped." in out
    for path, words in broken.items():
        (line,) = [line for line in err.splitlines() if repr(path) in line]
        assert line.startswith(f"skipped {path!r}: ")
        assert words in line
    summary = Index(tmp_path / "index").summary
    assert dict(summary.skipped).keys() == broken.keys()
    # Again: nothing is read by the model, the same is said.
    assert call("embed", docs, "--model", model_folder, "--out", "index", "--rule", "fixed(8)") == (code, out, err)


def test_only_broken_files(model_folder: Path, tmp_path: Path, call) -> None:
    write_broken(tmp_path / "docs")
    code, _, err = call("embed", "docs", "--model", model_folder, "--out", "index")
    assert code == 2
    assert "none of the 9 files is a text document" in err


def test_search_finds_what_comparison_with_every_chunk_finds(encoder: Encoder, tmp_path: Path) -> None:
    files = list_files([write_documents(tmp_path / "docs", 12)])
    chunker = LateChunker(encoder, rule=FixedStride(stride_tokens=8))
    build_index(tmp_path / "index", chunker, "fixed(8)", files)
    chunks = chunker.encode([read_document(path).text for path in files])
    index = Index(tmp_path / "index")
    for question in ("what is lost", "the whole document", "starts"):
        vector = index.chunker().encode_queries([question])[0]
        scores = np.stack([c.vector for c in chunks]) @ vector
        hits = index.search(vector, 5)
        assert [h.score for h in hits] == pytest.approx(np.sort(scores)[::-1][:5].tolist(), abs=1e-5)
        for hit in hits:
            text = read_document(Path(hit.path)).text
            assert hit.text == text[hit.start_char : hit.end_char]


def test_of_several_grids_the_best_offset_wins(encoder: Encoder, tmp_path: Path) -> None:
    files = list_files([write_documents(tmp_path / "docs", 12)])
    build_index(
        tmp_path / "index", LateChunker(encoder, rule=FixedStride(stride_tokens=8), offsets=4), "fixed(8)", files
    )
    index = Index(tmp_path / "index")
    vector = index.chunker().encode_queries(["what is lost"])[0]
    table = rows(tmp_path / "index")
    hits = index.search(vector, 10)
    assert hits[0].score == pytest.approx(max(np.dot(row["vector"], vector) for row in table), abs=1e-5)
    assert len(hits) == 10
    places = [(h.path, h.start_char, h.end_char) for h in hits]
    for n, (path, start, end) in enumerate(places):
        assert all(p != path or e <= start or end <= s for p, s, e in places[:n])
    assert len(index.search(vector, 10_000)) < len(table)


def test_export(encoder: Encoder, tmp_path: Path) -> None:
    files = list_files([write_documents(tmp_path / "docs", 5)])
    build_index(tmp_path / "index", LateChunker(encoder), "sentences(64)", files)
    index = Index(tmp_path / "index")
    table = rows(tmp_path / "index")
    assert index.export(tmp_path / "index.parquet") == index.export(tmp_path / "index.npz") == len(table)
    assert pq.read_table(tmp_path / "index.parquet").to_pylist() == table
    with np.load(tmp_path / "index.npz") as arrays:
        np.testing.assert_array_equal(arrays["vectors"], np.array([row["vector"] for row in table], dtype=np.float32))
        assert arrays["path"].tolist() == [row["path"] for row in table]
        assert arrays["start_char"].tolist() == [row["start_char"] for row in table]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["docs", "index", "index.npz", "index.parquet"]


def test_commands(model_folder: Path, tmp_path: Path, call) -> None:
    docs = write_documents(tmp_path / "docs", 4)
    assert call("embed", docs, "--model", model_folder, "--out", "index", "--mode", "late")[0] == 0
    code, out, _ = call("search", "index", "what is lost", "-k", 2, "--json", "-")
    assert code == 0
    found = json.loads(out)
    assert [hit["score"] for hit in found] == sorted((hit["score"] for hit in found), reverse=True)
    assert len(found) == 2
    code, out, _ = call("search", "index", "what is lost", "-k", 2)
    assert f"1. {found[0]['score']:.3f}  {found[0]['path']}" in out
    assert call("embed", "export", "index", "a.parquet")[0] == 0
    assert "embed compare" in call("embed", "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["embed", "missing", "--model", "M", "--out", "o"], "'missing' does not exist"),
        (["embed", "docs", "--model", "./nowhere", "--out", "o"], "model folder './nowhere' does not exist"),
        (["embed", "docs", "--model", "M", "--out", "o", "--rule", "words"], "chunk rule 'words' is unknown"),
        (["embed", "docs", "--model", "M", "--out", "o", "--rule", "fixed(0)"], "stride 0 must be at least 1"),
        (["embed", "docs", "--model", "M", "--out", "o", "--rule", "fixed(a)"], "cannot read the chunk rule"),
        (["embed", "docs", "--model", "M", "--out", "o", "--rule", "fixed(8, stride_tokens=9)"], "fixed has"),
        (["embed", "docs", "--model", "M", "--out", "o", "--rule", "sentences(radius=4)"], "sentences has"),
        (["embed", "docs", "--model", "M", "--out", "o", "--mode", "early"], "mode 'early' is unknown"),
        (["embed", "docs", "--model", "M", "--out", "o", "--late-weight", "2"], "weight of late vectors is 2"),
        (["embed", "docs", "--model", "M", "--out", "o", "--offsets", "2"], "2 grid offsets need a fixed stride"),
        (
            ["embed", "docs", "--model", "M", "--out", "o", "--rule", "fixed(4)", "--offsets", "5"],
            "do not fit a stride",
        ),
        (["embed", "docs", "--model", "M", "--out", "o", "--window", "99"], "windows of 99 tokens exceed the 24"),
        (["embed", "docs", "--model", "M", "--out", "o", "--window", "2"], "have no room"),
        (["embed", "docs", "--model", "M", "--out", "o", "--overlap", "22"], "Give --overlap 0 to 21"),
        (["embed", "docs", "--model", "M", "--out", "o", "--dtype", "int4"], "dtype 'int4' is unknown"),
        (["embed", "docs", "--model", "M", "--out", "docs"], "is not empty and not an index (it holds '000.txt')"),
        (["embed", "docs", "--model", "M", "--out", "docs/000.txt"], "cannot use 'docs/000.txt'"),
        (["search", "docs", "what"], "'docs' is not an index"),
        (["embed", "export", "docs", "a.csv"], "'docs' is not an index"),
        (["embed", "compare", "docs", "--model", "M", "--queries", "none"], "cannot read the queries 'none'"),
    ],
)
def test_bad_input(model_folder: Path, tmp_path: Path, call, arguments, words) -> None:
    write_documents(tmp_path / "docs", 2)
    code, out, err = call(*[str(model_folder) if a == "M" else a for a in arguments])
    assert code == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["docs"]


def test_an_index_of_other_settings_or_changed_files(model_folder: Path, tmp_path: Path, call) -> None:
    docs = write_documents(tmp_path / "docs", 3)
    embed = ("embed", docs, "--model", model_folder, "--out", "index", "--rule")
    assert call(*embed, "fixed(8)")[0] == 0
    before = rows(tmp_path / "index")
    code, _, err = call(*embed, "fixed(9)")
    assert code == 2
    assert "rule is 'fixed(8)' there and 'fixed(9)' here" in err
    (docs / "001.txt").write_text("changed")
    code, _, err = call(*embed, "fixed(8)")
    assert code == 2
    assert "001.txt' has changed since it was read" in err
    assert rows(tmp_path / "index") == before
    assert call("search", "index", "")[0] == 2
    assert "has no tokens" in call("search", "index", " ")[2]
    (tmp_path / "index" / "index.json").write_text("{")
    assert "cannot be read" in call("search", "index", "what")[2]


def test_another_model_is_not_taken_for_the_index_s_own(model_folder: Path, byte_folder: Path, tmp_path, call) -> None:
    write_documents(tmp_path / "docs", 2)
    assert call("embed", "docs", "--model", model_folder, "--out", "index")[0] == 0
    code, _, err = call("search", "index", "what", "--model", byte_folder)
    assert code == 2
    assert "is not the model that 'index' was made with" in err


def test_two_writers(encoder: Encoder, tmp_path: Path) -> None:
    files = list_files([write_documents(tmp_path / "docs", 2)])
    chunker = LateChunker(encoder)
    build_index(tmp_path / "index", chunker, "sentences(64)", files)
    from isophase.retrieval.index.tables import IndexSettings

    settings = IndexSettings.of(chunker, "sentences(64)", files)
    with (
        IndexWriter(tmp_path / "index", settings),
        pytest.raises(IsophaseError, match="being written by another process"),
    ):
        IndexWriter(tmp_path / "index", settings)


def test_full_disk(model_folder: Path, tmp_path: Path, call) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("only root may mount")
    try:
        write_documents(tmp_path / "docs", 40)
        embed = ("embed", "docs", "--model", model_folder, "--out", "disk/index", "--rule", "fixed(1)")
        code, _, err = call(*embed)
        assert code == 2
        assert err == "isophase: the disk of 'disk/index' is full. Free some space and repeat the command.\n"
        subprocess.run(["mount", "-o", "remount,size=64m", str(mount)], check=True)
        assert call(*embed)[0] == 0
        assert call(*embed[:-3], "calm", *embed[-2:])[0] == 0
        assert rows(mount / "index") == rows(tmp_path / "calm")
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_hidden_files_are_left_out_and_each_is_read_once(tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs", 3)
    (docs / ".git").mkdir()
    (docs / ".git" / "config").write_text("x")
    (docs / "sub").mkdir()
    (docs / "sub" / "a.md").write_text("x")
    found = list_files([docs / "001.txt", docs])
    assert [p.relative_to(docs).as_posix() for p in found] == ["001.txt", "000.txt", "002.txt", "sub/a.md"]
    (tmp_path / "bare").mkdir()
    with pytest.raises(IsophaseError, match="no files"):
        list_files([tmp_path / "bare"])
    unreadable = read_document(tmp_path / "gone.txt")
    assert "cannot be read" in unreadable.skipped


def test_settings_of_memory_leave_what_the_user_has_set(monkeypatch) -> None:
    from isophase.retrieval.late.allocation import keep_memory_steady

    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    keep_memory_steady()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    keep_memory_steady()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "32"
