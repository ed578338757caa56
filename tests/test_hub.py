"""Sets on the Hugging Face Hub: streamed in one pass, whole or not there, and never waited for without end.

    python -m pytest tests/test_hub.py        (nothing is downloaded: most streams are fakes, some are `datasets` on local files)
"""
import itertools
import json
import threading
import time
from pathlib import Path

import pytest

import prepare
from config import UserError
from test_prepare import files_of, parquet, script, texts, write

pytestmark = pytest.mark.slow

datasets = pytest.importorskip("datasets")
huggingface_hub = pytest.importorskip("huggingface_hub")


def rows(n):
    return [{"id": i, "text": f"row {i} 🦊\n" + "word " * i} for i in range(1, n + 1)]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """hub(stream) lets `datasets` give these rows; hub.calls is what it was asked for. There is no answer from the Hub."""
    def load_dataset(*args, **settings):
        hub.calls.append((*args, settings))
        return hub.stream() if callable(hub.stream) else hub.stream

    def hub(stream):
        hub.stream = stream

    def no_answer(*args, **settings):
        raise ConnectionError("no network in tests")

    hub.calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "dataset_info", no_answer)
    return hub


def go(source="tinystories", **settings):
    return prepare.prepare(source, **{"quiet": True, **settings})


# ---- what is streamed --------------------------------------------------------------------------------------------

def test_every_row_is_a_document_named_by_its_running_number(hub):
    hub([*rows(40), {"text": ""}, {"text": None}, *rows(3)])
    found = texts(go(val_fraction=0.3))
    assert sorted(found["train"] + found["val"]) == sorted(row["text"] for row in [*rows(40), *rows(3)])
    assert found["val"] == [row["text"] for i, row in enumerate([*rows(40), {"text": ""}, {"text": None}, *rows(3)], 1)
                            if row["text"] and prepare.place(f"tinystories:{i}") < 0.3]


@pytest.mark.parametrize("source, asked", [
    ("tinystories", [("roneneldan/TinyStories", None, "train", None)]),
    ("openwebtext", [("Skylion007/openwebtext", "plain_text", "train", None)]),
    ("fineweb-edu", [("HuggingFaceTB/smollm-corpus", "fineweb-edu-dedup", "train", None)]),
    ("shakespeare", [("karpathy/tiny_shakespeare", None, part, "refs/convert/parquet") for part in ("train", "validation", "test")])])
def test_a_short_name_asks_for_the_right_set(hub, source, asked):
    hub(rows(3))
    go(source)
    assert hub.calls == [(path, config, dict(split=split, revision=revision, streaming=True)) for path, config, split, revision in asked]


def test_shakespeare_is_all_of_it_and_its_last_part_is_val(hub):
    parts = iter("abc")
    hub(lambda: [{"text": f"part {next(parts)}\n"}])
    assert texts(go("shakespeare")) == {"train": ["part a\n", "part b\n"], "val": ["part c\n"]}


@pytest.mark.parametrize("n, val_fraction", [(2, 1e-9), (3, 1e-9), (3, 1 - 1e-9)])
def test_no_split_stays_empty(hub, n, val_fraction):
    hub(rows(n))
    found = texts(go(val_fraction=val_fraction))
    assert found["train"] and found["val"] and sorted(found["train"] + found["val"]) == sorted(row["text"] for row in rows(n))


def test_a_lone_row_is_cut_in_two(hub):
    hub([{"text": "1\n2\n3\n4\n"}])
    assert texts(go(val_fraction=0.25)) == {"train": ["1\n2\n3\n"], "val": ["4\n"]}


def test_an_endless_stream_ends_with_max_tokens(hub, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE", 1000)
    taken = []
    hub(lambda: ({"text": f"{i}\n"} for i in itertools.count(1) if not taken.append(i)))
    before = threading.active_count()
    for num_proc in (1, 3):
        go(name=f"n{num_proc}", max_tokens=2000, val_fraction=0.2, num_proc=num_proc)
    assert {**files_of(Path("data/n1")), "meta.json": 0} == {**files_of(Path("data/n3")), "meta.json": 0}
    meta = prepare.load_meta("data", "n1")
    assert 1998 <= meta["train"]["tokens"] + meta["val"]["tokens"] <= 2000 and 399 <= meta["val"]["tokens"] <= 400
    n, deadline = len(taken), time.time() + 5
    while threading.active_count() > before and time.time() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before and n < 5000          # and the threads that fetch have ended


def test_few_rows_are_fetched_ahead(hub):
    taken = []
    hub(lambda: (taken.append(row) or row for row in rows(1000)))
    stream = prepare.HubSet("tinystories", None).documents("text")
    for _ in range(10):
        next(stream)
    time.sleep(0.1)
    assert len(taken) <= 10 + 64 + 2


def test_the_progress_bar_counts_tokens_up_to_max_tokens(hub, monkeypatch):
    totals, steps = [], []

    class Bar(prepare.tqdm):
        def __init__(self, total, **settings):
            totals.append(total)
            super().__init__(total=total, **settings)

        def update(self, n):
            steps.append(n)

    monkeypatch.setattr(prepare, "tqdm", Bar)
    hub(rows(100))
    go(max_tokens=1000)
    meta = prepare.load_meta("data", "tinystories")
    assert totals == [1000] and 998 <= sum(steps) <= 1000 and sum(steps) == meta["train"]["tokens"] + meta["val"]["tokens"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_real_library_streams_the_same(tmp_path, monkeypatch, kind):
    """`datasets` itself, on a folder: what a Hub set comes through is the real thing, but for the network."""
    monkeypatch.chdir(tmp_path)
    if kind == "parquet":
        parquet(tmp_path / "set/train-0.parquet", {key: [row[key] for row in rows(300)] for key in ("id", "text")}, row_group_size=50)
    else:
        write(tmp_path / "set", {"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows(300))})
    monkeypatch.setitem(prepare.HUB, "local", dict(path=str(tmp_path / "set"), config=None, split="train", revision=None))
    found = texts(go("local"))
    assert sorted(found["train"] + found["val"]) == sorted(row["text"] for row in rows(300))
    assert found["val"] == [row["text"] for i, row in enumerate(rows(300), 1) if prepare.place(f"local:{i}") < 0.05]
    with pytest.raises(UserError, match="local:1: no field 'body'; fields here: id, text; choose one with --field"):
        go("local", field="body", name="other")


@pytest.mark.slow
def test_a_process_that_leaves_the_real_stream_early_ends_well(tmp_path):
    parquet(tmp_path / "set/train-0.parquet", {"text": [row["text"] for row in rows(3000)]}, row_group_size=100)
    code = "import prepare\nprepare.HUB['local'] = dict(path='set', config=None, split='train', revision=None)\nprepare.run()"
    done = script("local", "--max_tokens=1e4", cwd=tmp_path, code=code, env={"HF_HUB_OFFLINE": "1"})
    assert (done.returncode, done.stderr) == (0, b"") and b"next: python train.py --dataset=local" in done.stdout
    done = script("local", "--field=body", cwd=tmp_path, code=code, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"no field 'body'" in done.stderr


# ---- names -------------------------------------------------------------------------------------------------------

def test_a_short_name_wins_over_a_file_unless_it_is_written_as_a_path(hub, tmp_path):
    write(tmp_path, {"tinystories/a.txt": "mine", "tinystories/b.txt": "too"})
    hub(rows(3))
    for source in ("./tinystories", Path("tinystories"), str(tmp_path / "tinystories")):
        assert sorted(sum(texts(go(source, name="mine")).values(), [])) == ["mine", "too"] and not hub.calls
    assert len(sum(texts(go()).values(), [])) == 3 and hub.calls


def test_a_misspelt_name_is_answered_with_the_nearest(tmp_path):
    done = script("fineweb", cwd=tmp_path)
    assert done.returncode == 2 and b"did you mean 'fineweb-edu'?" in done.stderr and done.stderr.count(b"\n") == 1


# ---- meta.json, and a second run ---------------------------------------------------------------------------------

def test_meta_tells_where_it_came_from(hub):
    hub(rows(9))
    go("fineweb-edu", max_tokens=99)
    meta = prepare.load_meta("data", "fineweb-edu")
    assert meta["source"] == "fineweb-edu" and meta["settings"] == {"val_fraction": 0.05, "field": "text", "max_tokens": 99}
    assert meta["hub"] == dict(path="HuggingFaceTB/smollm-corpus", config="fineweb-edu-dedup", split="train", revision=None)


def test_another_text_under_the_same_name_has_another_hash(hub):
    hashes = []
    for stream in (rows(9), rows(9), rows(10)):
        hub(stream)
        hashes.append(prepare.load_meta(go(name=f"n{len(hashes)}").parent, f"n{len(hashes)}")["source_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_second_run_asks_nobody_and_says_so(hub, capsys):
    hub(rows(9))
    folder = go()
    hub.calls.clear()
    assert go(quiet=False) == folder and not hub.calls and "up to date" in capsys.readouterr().out


@pytest.mark.parametrize("settings, changed", [
    ({"revision": "v2"}, "hub"), ({"max_tokens": 50}, "settings"), ({"val_fraction": 0.5}, "settings"), ({"field": "also"}, "settings")])
def test_a_second_run_with_other_settings_says_what_changed(hub, capsys, settings, changed):
    hub([{**row, "also": "x"} for row in rows(9)])
    go()
    go(quiet=False, **settings)
    assert f"changed: {changed}" in capsys.readouterr().out
    assert len(hub.calls) == 2 and hub.calls[1][-1]["revision"] == settings.get("revision")


# ---- no network, and a line that dies ----------------------------------------------------------------------------

def dies(n, how):
    def stream():
        yield from rows(n)
        how()
    return stream


def hang():
    time.sleep(3)


def test_a_stream_that_breaks_is_one_line_and_leaves_the_old_set(hub):
    def broken():
        raise ConnectionError("the line\nis dead")

    hub(rows(9))
    old = files_of(go())
    hub(dies(5, broken))
    with pytest.raises(UserError, match="^tinystories: roneneldan/TinyStories .* row 6: ConnectionError: the line is dead; "):
        go(val_fraction=0.3)
    assert files_of(Path("data/tinystories")) == old and [path.name for path in Path("data").iterdir()] == ["tinystories"]


def test_a_stall_in_the_middle_is_given_up(hub, monkeypatch):
    monkeypatch.setattr(prepare, "STALL", 0.2)
    hub(dies(5, hang))
    with pytest.raises(UserError, match=r"row 6: TimeoutError: nothing came for 0.2 seconds"):
        go()
    assert not list(Path("data").iterdir())


@pytest.mark.parametrize("alive", [False, True])
def test_a_slow_first_row_is_waited_for_only_if_the_hub_answers(hub, monkeypatch, alive):
    monkeypatch.setattr(prepare, "PATIENCE", 0.2)
    if alive:
        monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *args, **settings: "here I am")
    hub(lambda: (time.sleep(0.5), *rows(9))[1:])
    if alive:
        assert len(sum(texts(go()).values(), [])) == 9
    else:
        with pytest.raises(UserError, match="row 1: TimeoutError: nothing came for 0.2 seconds; connect and run this again"):
            go()
        assert not Path("data").exists()


def test_too_little_text_is_refused(hub):
    for stream in ([], [{"text": "x"}], [{"text": ""}] * 3):
        hub(stream)
        with pytest.raises(UserError, match="too few for two splits"):
            go()
    assert not Path("data").exists()


@pytest.mark.parametrize("env", [{"HF_HUB_OFFLINE": "1"}, pytest.param({"HF_ENDPOINT": "http://127.0.0.1:9"}, marks=pytest.mark.slow)])
def test_no_network_is_one_line_in_time(tmp_path, env):
    assert prepare.PATIENCE < 8                     # the promise is 10 seconds, all told
    done = script("fineweb-edu", cwd=tmp_path, env={"HF_HOME": str(tmp_path / "home"), **env})
    assert done.returncode == 2 and not done.stdout
    message = done.stderr.decode("utf-8")
    assert message.count("\n") == 1 and message.startswith("fineweb-edu: HuggingFaceTB/smollm-corpus on the Hugging Face Hub, row 1: ")
    assert "OfflineModeIsEnabled" in message or f"nothing came for {prepare.PATIENCE} seconds" in message
    assert "give a text, JSONL or Parquet file as SOURCE" in message and not (tmp_path / "data").exists()
