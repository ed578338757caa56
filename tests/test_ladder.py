"""`bench.py ladder`: what is recorded is not trained again, what was killed goes on, and the table says no more than the seeds do.

    python -m pytest -q tests/test_ladder.py
"""
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toy import DENSE, flags, make_config, make_data, refusal

import bench
import eval as evaluation
import prepare
import train
from config import UserError
from model import GPTConfig

pytestmark = pytest.mark.slow

ROOT = Path(bench.__file__).resolve().parent
LADDERS = sorted(path for path in (ROOT / "config" / "ladder").iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data/toy."""
    folder = tmp_path_factory.mktemp("ladder")
    make_data(folder)
    return folder


class Inside:
    """A process that is none: train.py in this one, at once. `begun` counts them."""
    begun = []

    def __init__(self, argv, stdout=None, env=None, **kwargs):
        assert Path(argv[1]).name == "train.py" and env["OMP_NUM_THREADS"] == "1"
        Inside.begun.append(argv[2:])
        self.returncode = 0
        with open(stdout.name, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            try:
                train.main(argv[2:])
            except (UserError, SystemExit) as error:
                print(error)
                self.returncode = 2

    def poll(self):
        return self.returncode

    def send_signal(self, which):
        pass


@pytest.fixture
def go(place, tmp_path, monkeypatch, capsys, request):
    """go(*files, **flags) -> (stdout's lines, the JSON record with the first ladder's, stderr, how many runs were begun); toy.py and dense.py are here."""
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(place / "data")
    make_config(tmp_path, **DENSE)
    os.rename("toy.py", "dense.py")
    make_config(tmp_path)
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(Popen=Inside, DEVNULL=None, STDOUT=None))
    if "picture" not in request.node.name:
        monkeypatch.setattr(bench, "draw_ladder", lambda path, name, rows: None)         # half a second each

    def go(*files, **changes):
        Inside.begun = []
        try:
            bench.main(["ladder", *(files or ("toy.py", "dense.py")), *flags(**{"results": "results.jsonl", "seeds": "1,2", **changes})])
        finally:
            go.out, go.err = capsys.readouterr()
        lines = go.out.splitlines()
        record = json.loads(lines[-1])
        return lines[:-1], record | next(iter(record["ladders"].values())), go.err, len(Inside.begun)
    return go


def lines_of(path="results.jsonl"):
    return Path(path).read_text("utf-8").splitlines()


def results_of(path="results.jsonl"):
    """{(config, seed): results without the time they took}."""
    records = map(json.loads, lines_of(path))
    return {(r["config"], r["seed"]): {name: value for name, value in r["results"].items() if name != "seconds"} for r in records}


# ------------------------------------------------------------------------------------------------- what is run, and what is not

@pytest.mark.slow
def test_a_ladder_trains_every_config_at_every_seed_and_records_what_the_log_says(go):
    _, record, err, begun = go()
    assert begun == 4 and len(lines_of()) == 4 and err.count("begins in") == 4
    for argv in Inside.begun:
        home = Path(next(arg for arg in argv if arg.startswith("--out_dir=")).removeprefix("--out_dir="))
        last = json.loads((home / "log.jsonl").read_text("utf-8").splitlines()[-1])
        found = results_of()[Path(argv[0]).stem, int(home.name.split("-seed")[1][0])]
        assert (last["event"], last["step"]) == ("eval", 4) and {name: found[name] for name in ("step", "val_loss", "by_depth")} == {
            name: last[name] for name in ("step", "val_loss", "by_depth")}
    assert [(row["name"], row["seeds"], row["missing"]) for row in record["rows"]] == [("toy", [1, 2], []), ("dense", [1, 2], [])]


def test_a_recorded_run_of_a_ladder_is_skipped_even_when_its_folder_is_gone(go):
    table, record, _, _ = go()
    kept = lines_of()
    shutil.rmtree("out")
    again, same, _, begun = go(log_interval=2, eval_interval=3, out_dir="elsewhere", device="cpu")       # none of these decides anything
    assert begun == 0 and (again, same["rows"]) == (table, record["rows"]) and lines_of() == kept


@pytest.mark.slow
def test_a_run_that_ended_while_nobody_looked_is_recorded_and_not_trained_again(go):
    go()
    kept = results_of()
    os.remove("results.jsonl")
    assert go()[3] == 0 and results_of() == kept


@pytest.mark.slow
def test_a_changed_setting_or_config_or_data_set_runs_again(go, tmp_path):
    go("toy.py", seeds=1)
    assert go("toy.py", seeds=1, learning_rate=3e-3)[3] == 1
    assert go("toy.py", seeds=1, learning_rate=3e-3)[3] == 0
    make_config(tmp_path, gate_noise=0.2)
    assert go("toy.py", seeds=1)[3] == 1
    make_config(tmp_path)
    assert go("toy.py", seeds="1,3")[3] == 1                              # the first is there since the beginning
    meta = Path("data/toy/meta.json").read_text("utf-8")
    shutil.copytree("data/toy", "mine/toy")
    shutil.copy("mine/toy/val.bin", "val.bin")
    other = json.loads(meta)
    other["val"]["sha256"] = "0" * 64
    Path("mine/toy/meta.json").write_text(json.dumps(other), "utf-8")
    assert go("toy.py", seeds=1, data_dir="mine")[3] == 1
    shutil.copytree("data/toy", "moved/toy")
    assert go("toy.py", seeds=1, data_dir="moved")[3] == 0                # the same data in another place


def test_a_key_that_is_younger_than_a_record_stood_at_its_default_then():
    then = {**bench.DEFAULTS, "seed": 1, "vocab_size": 320, "dtype": "float32", "data": {"train": "a"}}
    del then["gate_noise"]
    trial = lambda **changes: SimpleNamespace(decides={**then, "gate_noise": bench.DEFAULTS["gate_noise"], **changes})  # noqa: E731
    record = {"settings": then, "results": {}}
    assert bench.recorded(trial(), [record]) is record and bench.recorded(trial(gate_noise=0.3), [record]) is None
    assert bench.recorded(trial(seed=2), [record]) is None and bench.recorded(trial(data={"train": "b"}), [record]) is None
    assert bench.recorded(trial(data=None, vocab_size=None, dtype="auto"), [record], anywhere=True) is record
    gone = {"settings": {**then, "a_key_that_was_removed": 1}, "results": {}}
    assert bench.recorded(trial(), [gone]) is None


def test_every_key_decides_unless_it_is_known_not_to():
    assert set(bench.ELSEWHERE) < set(train.parse(["config/grt_tiny.py"] if Path("config").exists() else [str(ROOT / "config/grt_tiny.py")]).values)
    assert not set(bench.ELSEWHERE) & {"seed", "learning_rate", "max_iters", "batch_size", "eval_tokens", "n_recur", "dtype", "dataset"}


@pytest.mark.parametrize("stage", ["in the middle", "before its first checkpoint"])
@pytest.mark.slow
def test_a_killed_run_of_a_ladder_resumes_to_the_numbers_of_an_unbroken_one(go, monkeypatch, stage):
    whole = dict(seeds=1, max_iters=6, eval_interval=2)
    go("toy.py", **whole, results="unbroken.jsonl", out_dir="unbroken")
    update, evaluate = train.Run.update, train.Run.evaluate

    def killed(self, *args):
        if stage != "in the middle" or self.step == 5:
            raise SystemExit(9)
        return (update if stage == "in the middle" else evaluate)(self, *args)

    with monkeypatch.context() as patched, pytest.raises(UserError, match="/toy seed 1 failed"):
        patched.setattr(train.Run, "update" if stage == "in the middle" else "evaluate", killed)
        go("toy.py", **whole)
    (home,) = Path("out/ladder").glob("*-toy-seed1-*")
    assert (home / "log.jsonl").is_file() and (home / "ckpt.pt").is_file() == (stage == "in the middle") and lines_of() == []
    err = go("toy.py", **whole)[2]
    assert ("goes on in" in err) == (stage == "in the middle") and results_of() == results_of("unbroken.jsonl")
    assert list(Path("out/ladder").glob("*-toy-seed1-*")) == [home]         # in its own folder


def test_a_failing_run_of_a_ladder_is_reported_and_the_others_go_on(go, tmp_path):
    shutil.move("toy.py", "kept.py")
    make_config(tmp_path, learning_rate=1e38, grad_clip=0.0)
    shutil.move("toy.py", "wild.py")
    shutil.move("kept.py", "toy.py")
    with pytest.raises(UserError, match="wild seed 1 failed: exit code 2: the loss or its gradient is not finite.*wild seed 2 failed"):
        go("wild.py", "toy.py")
    record = json.loads(go.out.splitlines()[-1])
    record |= record["ladders"][Path.cwd().name]
    assert {name.rpartition("/")[2] for name in record["failed"]} == {"wild seed 1", "wild seed 2"} and set(results_of()) == {("toy", 1), ("toy", 2)}
    wild, toy = record["rows"]
    assert (wild["seeds"], wild["missing"], toy["seeds"]) == ([], [1, 2], [1, 2]) and record["pairs"][0]["val_loss"] is None
    assert "| `wild` | not trained |" in go.out


@pytest.mark.parametrize("then", ["it is killed", "it ends", "another ladder records it"])
def test_a_ladder_waits_for_a_run_that_another_process_has(go, monkeypatch, then):
    go("toy.py", seeds=1)
    (home,) = Path("out/ladder").glob("*-toy-seed1-*")
    kept, log = Path("results.jsonl").read_text("utf-8"), (home / "log.jsonl").read_text("utf-8")
    os.remove("results.jsonl")
    os.remove(home / "log.jsonl")
    os.remove(home / "ckpt.pt")
    lock, sleeps = train.hold(home), []

    def sleep(seconds):
        sleeps.append(seconds)
        assert len(sleeps) < 50 and (len(sleeps) > 2 or Inside.begun == [])
        if len(sleeps) == 3:
            (home / "log.jsonl").write_text(log, "utf-8") if then == "it ends" else None
            Path("results.jsonl").write_text(kept, "utf-8") if "records" in then else None
            lock.close()

    monkeypatch.setattr(bench.time, "sleep", sleep)
    _, record, err, begun = go("toy.py", seeds=1)
    assert begun == (then == "it is killed") and len(lines_of()) == 1 and record["rows"][0]["seeds"] == [1] and record["failed"] == {}
    assert err.count("another process is training in") == 1 and "its turn comes when that ends" in err


@pytest.mark.parametrize("when", ["before it begins here", "while it begins here"])
def test_two_ladders_that_share_a_run_train_it_once_and_record_it_once(go, monkeypatch, when):
    go("toy.py")
    kept = lines_of()
    Path("results.jsonl").write_text("", "utf-8")
    shutil.rmtree("out")
    locks, begin = [], bench.begin

    def late(trial, threads):
        if trial.settings.seed == 1 and when == "before it begins here":
            Path("results.jsonl").write_text(kept[1] + "\n", "utf-8")      # the other ladder's second run ends as the first begins here
        if trial.settings.seed == 2:
            locks.append(train.hold(trial.home))                           # what train.py will find
            return type("Refused", (), {"poll": lambda self: 2, "returncode": 2})()
        return begin(trial, threads)

    def sleep(seconds):
        if locks and not locks[0].closed:
            with open("results.jsonl", "a", encoding="utf-8") as file:
                file.write(kept[1] + "\n")
            locks[0].close()

    monkeypatch.setattr(bench, "begin", late)
    monkeypatch.setattr(bench.time, "sleep", sleep)
    _, record, _, begun = go("toy.py", jobs=1)
    assert begun == 1 and len(locks) == (when == "while it begins here") and record["failed"] == {}
    assert sorted(json.loads(line)["seed"] for line in lines_of()) == [1, 2] and record["rows"][0]["seeds"] == [1, 2]


def test_a_run_that_is_taken_at_the_last_moment_fails_with_what_to_do(go, monkeypatch):
    begin, locks = bench.begin, []
    monkeypatch.setattr(bench, "begin", lambda trial, threads: (locks.append(train.hold(trial.home)), begin(trial, threads)))
    with pytest.raises(UserError, match="another process is training in .*; wait for it, then run this again"):
        go("toy.py", seeds=1)
    assert Inside.begun == []


def test_a_folder_is_the_ladder_of_its_configs_in_order(go):
    for name in ("mine/10_last.py", "mine/9_first.py", "mine/__init__.py", "mine/notes.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy("toy.py", name)
    _, record, _, begun = go("mine", jobs=0)
    assert [row["name"] for row in record["rows"]] == ["9_first", "10_last"] and begun == 0 and list(record["ladders"]) == ["mine"]
    assert [row["name"] for row in go("mine/", "dense.py", jobs=0)[1]["ladders"]["mine"]["rows"]] == ["9_first", "10_last"]
    Path("empty").mkdir()
    assert "'empty' holds no config file; name a folder that does" in refusal(go, "empty", jobs=0)
    assert "bench.py ladder: 'nowhere' is neither a config file (.py) nor a folder of them" in refusal(go, "nowhere", jobs=0)


def test_equal_rungs_of_two_ladders_are_one_run_in_two_tables(go):
    for name in ("a", "b"):
        Path(name).mkdir()
        shutil.copy("toy.py", name)
    _, record, _, begun = go("a/toy.py", "b/toy.py", seeds="1,2")
    assert begun == 2 and {json.loads(line)["ladder"] for line in lines_of()} == {"a"}
    assert list(record["ladders"]) == ["a", "b"] and record["ladders"]["a"] == record["ladders"]["b"] and record["pairs"] == []
    assert go("b/toy.py")[3] == 0 and {path.name for path in Path("out/ladder").glob("*.json")} == {"a-toy.json", "b-toy.json"}


def test_seeds_come_before_rungs_so_that_a_ladder_which_is_stopped_can_be_compared(go):
    go()
    order = [(Path(argv[0]).stem, argv[1]) for argv in Inside.begun]
    assert order == [("toy", "--seed=1"), ("dense", "--seed=1"), ("toy", "--seed=2"), ("dense", "--seed=2")]


def test_without_jobs_a_ladder_prints_what_is_recorded_on_any_data_and_trains_nothing(go):
    table, record, _, _ = go()
    os.remove("data")
    again, same, _, begun = go(jobs=0)
    assert begun == 0 and again == table and same["rows"] == record["rows"]
    assert go(jobs=0, seeds="1,2,3")[1]["rows"][0]["missing"] == [3]


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_ladder_stops_its_runs_begins_none_and_waits_until_they_have_saved(go, monkeypatch, which):
    sent = []

    class Asked:
        """Ends some looks after it was asked to, the first one sooner than the second."""
        returncode = None

        def __init__(self, *args, **kwargs):
            self.looks = 0

        def send_signal(self, signal):
            sent.append((self, signal))

        def poll(self):
            if self is processes[0] and not self.looks:
                os.kill(os.getpid(), which)
            self.looks += 1
            assert self.looks < 50                                        # a ladder that waits for ever
            self.returncode = 130 if sent and self.looks > 4 * (1 + processes.index(self)) else None
            return self.returncode

    processes = []
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(Popen=lambda *a, **k: processes.append(Asked()) or processes[-1], DEVNULL=None, STDOUT=None))
    monkeypatch.setattr(bench.time, "sleep", lambda seconds: None)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        go(jobs=2)
    assert len(processes) == 2 and sent == [(process, signal.SIGINT) for process in processes] and {process.returncode for process in processes} == {130}
    assert "the same command goes on" in go.err and "failed" not in go.err
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


@pytest.mark.slow
def test_ctrl_c_on_a_real_ladder_lets_its_runs_save(place, tmp_path):
    (tmp_path / "data").symlink_to(place / "data")
    make_config(tmp_path, max_iters=10**6)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "bench.py"), "ladder", "toy.py", "--seeds=1", "--results=results.jsonl"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        log = lambda: next(iter(tmp_path.glob("out/ladder/*/log.jsonl")), None)  # noqa: E731
        end = time.monotonic() + 120
        while time.monotonic() < end and not (log() and log().read_text("utf-8").count('"step",')):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in err and "Traceback" not in err
    state = torch.load(log().with_name("ckpt.pt"), weights_only=True)
    assert state["step"] > 0 and "stopped after step" in log().with_name("output.txt").read_text("utf-8")
    assert train.hold(log().parent)                                       # nobody is left in there


# -------------------------------------------------------------------------------------------------------- the file of results

def test_the_file_of_a_ladders_results_only_grows_and_survives_a_half_written_line(go):
    go("toy.py", seeds=1)
    with open("results.jsonl", "ab") as file:
        file.write(b'{"settings": 3, "results": 4}\n{"settings": {}, "results": {}}\n')      # by hand
        no_loss = json.loads(lines_of()[0])
        no_loss["results"]["val_loss"] = None
        file.write(json.dumps(no_loss).encode() + b"\n")                  # of the newest of two records it would be the result
        file.write(b'{"ladder": "cut')                                    # a kill, or a full disk
    before = Path("results.jsonl").read_bytes()
    assert go("toy.py", seeds="1,2")[3] == 1
    after = Path("results.jsonl").read_bytes()
    assert after.startswith(before) and after.endswith(b"}\n") and go("toy.py", seeds="1,2")[3] == 0
    assert Path("results.jsonl").read_bytes() == after and len(bench.read_results(Path("results.jsonl"))) == 2


def test_a_ladders_results_hold_no_path_of_this_machine(go, tmp_path):
    go("toy.py", seeds=1, data_dir=tmp_path / "data", out_dir=tmp_path / "runs", learning_rate=1e-3)
    record = json.loads(lines_of()[0])
    assert str(tmp_path) not in lines_of()[0] and record["flags"] == ["--learning_rate=0.001"] and record["settings"]["learning_rate"] == 1e-3
    assert {"ladder", "config", "seed", "flags", "fingerprint", "commit", "torch", "python", "date", "results", "settings"} == set(record)


def test_the_committed_results_of_the_ladders_are_whole_and_of_configs_that_exist():
    path = ROOT / "config" / "ladder" / "results.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    assert len(bench.read_results(path)) == len(lines)
    for line in lines:
        record = json.loads(line)
        assert (path.parent / record["ladder"] / f"{record['config']}.py").is_file() and "/tmp" not in line and "/home" not in line
        assert record["results"]["step"] == record["settings"]["max_iters"] and record["seed"] == record["settings"]["seed"]


# ------------------------------------------------------------------------------------------------------------------ the table

def test_the_ladder_table_gives_mean_and_standard_deviation_over_seeds(go):
    table, record, _, _ = go(seeds="1,2,3")
    for row in record["rows"]:
        values = [results_of()[row["name"], seed]["val_loss"] for seed in (1, 2, 3)]
        assert row["val_loss"]["values"] == values
        assert (row["val_loss"]["mean"], row["val_loss"]["sd"]) == (pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)))
        cells = next(line for line in table if line.startswith(f"| `{row['name']}` |"))
        assert f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}".replace("± 0.", "± .") in cells and f"| {row['layout']} |" in cells
    assert "| depth 1 | depth 2 | depth 4 |" in table[2]
    assert [*Path(f"out/ladder/{Path.cwd().name}-toy.md").read_text("utf-8").splitlines(), ""] == table


def test_a_ladder_of_one_seed_makes_no_claim(go):
    table, record, _, _ = go(seeds=1)
    assert record["pairs"] == [{"from": "toy", "to": "dense", "val_loss": None}] and "| `toy` | `dense` | fewer than two seeds: no claim |" in table
    assert not any(" ± " in line for line in table if line.startswith("| `"))


@pytest.mark.parametrize("a, b", [([1.0, 1.2, 1.1], [1.3, 1.5, 1.6, 1.4]), ([2.0, 2.5], [1.9, 2.1]), ([1.0, 1.1], [1.9, 2.0, 2.2]), ([3.0, 3.0], [3.0, 3.0])])
def test_a_difference_in_the_ladder_table_is_separated_from_two_pooled_standard_errors_on(a, b):
    found, n, m = bench.difference(bench.spread(a), bench.spread(b)), len(a), len(b)
    pooled = ((n - 1) * np.var(a, ddof=1) + (m - 1) * np.var(b, ddof=1)) / (n + m - 2)
    error = np.sqrt(pooled * (1 / n + 1 / m))
    assert found["value"] == pytest.approx(np.mean(b) - np.mean(a)) and found["standard_error"] == pytest.approx(error)
    assert found["separated"] == (abs(np.mean(b) - np.mean(a)) > 2 * error)


def test_close_rungs_of_a_ladder_are_not_separated_and_far_ones_are():
    near, less, more, far = (([1.0, 1.1, 1.2], [1.0 + by, 1.1 + by, 1.2 + by]) for by in (0.05, 0.15, 0.17, 1.0))
    for (a, b), words in ((near, "+0.0500 ± 0.0816, not separated"), (less, "+0.1500 ± 0.0816, not separated"), (more, "+0.1700 ± 0.0816 |"),
                          (far, "+1.0000 ± 0.0816 |")):
        rows = [{"name": name, "val_loss": bench.spread(values), "accuracy": None} for name, values in (("a", a), ("b", b))]
        assert any(words in line for line in bench.pair_lines(bench.pairs_of(rows)))


def test_each_rung_of_a_ladder_stands_against_the_one_before_and_the_first():
    rows = [{"name": name, "val_loss": None, "accuracy": None} for name in "abcd"]
    assert [pair["from"] + pair["to"] for pair in bench.pairs_of(rows)] == ["ab", "bc", "cd", "ac", "ad"]


def test_accuracy_on_answers_has_columns_in_the_ladder_table_where_it_was_recorded(go):
    go()
    records = [json.loads(line) for line in lines_of()]
    for record in records:
        record["results"] |= {"accuracy": 0.5 + 0.1 * record["seed"], "accuracy_by_group": {"2 hops": 1.0, "10 hops": 0.25 * record["seed"]}}
    Path("results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    table, record, _, _ = go()
    assert "| 0.650 ± .071 |" in next(line for line in table if line.startswith("| `toy` | 1+1x4+1 |"))
    assert "| config | 2 hops | 10 hops |" in table and "| `toy` | 1.000 ± .000 | 0.375 ± .177 |" in table
    assert record["pairs"][0]["accuracy"]["separated"] is False


def test_blocks_of_a_routed_rung_of_a_ladder_are_those_that_its_tokens_passed_on_average(go):
    go()
    records = [json.loads(line) for line in lines_of()]
    for record in records[::2]:
        record["results"]["mean_depth"] = 2.0 + record["seed"] / 3                             # as a router's evaluation records it
    Path("results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    table, record, _, _ = go()
    toy, dense = record["rows"]
    assert toy["blocks_average"]["mean"] == pytest.approx(1 + 2.5 + 1) and dense["blocks_average"] is None
    assert " | 4.5 of 6 | " in next(line for line in table if line.startswith("| `toy` |"))
    assert " | 2 | " in next(line for line in table if line.startswith("| `dense` |"))


def test_the_ladder_table_says_when_its_rows_are_of_different_data(go):
    go()
    records = [json.loads(line) for line in lines_of()]
    records[0]["settings"]["data"] = {"train": "another"}
    Path("results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    assert any("2 different data sets" in line for line in go(jobs=0)[0])


@pytest.mark.parametrize("name", ["toy", "dense"])
def test_training_flops_of_a_ladder_are_those_of_the_depths_that_were_drawn(go, name):
    go(f"{name}.py", seeds=5, log_interval=1, gradient_accumulation_steps=2)
    (log,) = Path("out/ladder").glob("*/log.jsonl")
    steps = [event for event in map(json.loads, log.read_text("utf-8").splitlines()) if event["event"] == "step"]
    cfg = train.parse([f"{name}.py"]).build(GPTConfig, vocab_size=320)
    of_depth = lambda depth: cfg.flops_per_token(cfg.block_size, depth=depth)  # noqa: E731
    expected = sum(3 * step["tokens_per_update"] * of_depth(step["depth"]) for step in steps)              # of the mean depth: FLOPs are linear in it
    assert results_of()[name, 5]["training_flops"] == pytest.approx(expected, rel=1e-9) and len(steps) == 4


def test_training_flops_of_a_ladder_on_a_synthetic_set_are_of_its_shorter_rows(go, monkeypatch):
    monkeypatch.setattr(prepare, "EXAMPLE_TOKENS", 24_000)
    go("toy.py", seeds=5, dataset="phop", data_dir="made", block_size=256, depth_sampling="fixed")
    cfg = train.parse(["toy.py", f"--block_size={prepare.ROW}"]).build(GPTConfig, vocab_size=320)
    assert results_of()["toy", 5]["training_flops"] == 3 * 4 * 4 * prepare.ROW * cfg.flops_per_token(prepare.ROW)


def test_training_flops_of_a_ladder_count_no_backward_through_steps_that_gradients_do_not_reach(go):
    go("toy.py", seeds=5, log_interval=1, update="inject", gate_noise=0.0, depth_sampling="poisson", bptt=2)
    (log,) = Path("out/ladder").glob("*/log.jsonl")
    steps = [event for event in map(json.loads, log.read_text("utf-8").splitlines()) if event["event"] == "step"]
    cfg = train.parse(["toy.py", "--update=inject", "--gate_noise=0"]).build(GPTConfig, vocab_size=320)
    forward = lambda depth: cfg.flops_per_token(cfg.block_size, depth=depth)  # noqa: E731
    expected = sum(step["tokens_per_update"] * (forward(step["depth"]) + 2 * forward(min(2, step["depth"]))) for step in steps)
    assert results_of()["toy", 5]["training_flops"] == expected and max(step["depth"] for step in steps) > 2


def test_training_flops_of_a_ladder_count_coda_head_and_exit_gate_of_every_step_with_ouros_loss():
    cfg, last, more = (GPTConfig(vocab_size=320, block_size=32, n_embd=16, n_head=2, n_prelude=1, n_core=1, n_recur=4, n_coda=n_coda, loss=loss)
                       for n_coda, loss in ((1, "every"), (1, "last"), (2, "last")))
    s = SimpleNamespace(seed=1, batch_size=4, gradient_accumulation_steps=1, max_iters=10)
    ends = more.flops_per_token(32) - last.flops_per_token(32) + 2 * 16 * 320
    assert bench.training_flops(cfg, s) - bench.training_flops(last, s) == pytest.approx(3 * 10 * 4 * 32 * (3 * ends + 4 * 2 * 16))


def test_seconds_of_a_ladder_count_a_step_that_was_taken_again_once():
    log = [{"step": 10, "ms_per_update": 100}, {"step": 20, "ms_per_update": 300}, {"step": 20, "ms_per_update": 200}, {"step": 25, "ms_per_update": 400}]
    assert bench.seconds_of(log) == pytest.approx(1 + 2 + 2)


@pytest.mark.slow
def test_a_ladder_draws_a_picture_and_without_matplotlib_says_so_in_one_line(go, monkeypatch):
    pytest.importorskip("matplotlib")
    name = f"out/ladder/{Path.cwd().name}-toy.png"
    assert "picture:" in go()[2] and Path(name).read_bytes()[:4] == b"\x89PNG"
    os.remove(name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    evaluation.no_pictures.cache_clear()
    assert go()[2].splitlines() == ["note: no pictures, as matplotlib is not here (pip install matplotlib)"] and not Path(name).exists()


def test_the_picture_of_a_ladder_shows_accuracy_by_group_where_there_is_one_and_whole_depths(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn, one = [], bench.spread([0.5, 0.7])
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, file, **kwargs: drawn.append(self))
    rows = [{"name": name, "val_loss": one, "by_depth": {"1": one, "2": one} if name == "b" else {"1": one},
             "accuracy_by_group": {"1 hop": one, "10 hops": one} if name == "a" else {"2 hops": one}} for name in "ab"]
    bench.draw_ladder(tmp_path / "x.png", "mine on phop", rows)
    bench.draw_ladder(tmp_path / "x.png", "mine on toy", [row | {"accuracy_by_group": {}} for row in rows])
    loss, groups, depth = drawn[0].axes
    assert loss.get_title().startswith("mine on phop") and [text.get_text() for text in groups.get_xticklabels()] == ["1 hop", "2 hops", "10 hops"]
    assert [(line.get_label(), list(line.get_xdata())) for line in groups.lines] == [("a", [0, 2]), ("b", [1])]
    assert list(groups.lines[0].get_ydata()) == pytest.approx([0.6, 0.6]) and groups.lines[1].get_color() == depth.lines[0].get_color()
    assert all(tick == int(tick) for tick in depth.get_xticks()) and len(drawn[1].axes) == 2


@pytest.mark.parametrize("changes, words", [
    ({"seeds": "1,1"}, "seeds=[1, 1]"), ({"seeds": "[]"}, "seeds=[]"), ({"seeds": -1}, "seeds=[-1]"), ({"seed": 3}, "write --seeds=3"),
    ({"depth": 2}, "depth=2 has no part in a ladder"), ({"repeats": 3}, "repeats=3 has no part"), ({"jobs": -1}, "jobs=-1"),
    ({"init_from": "resume"}, "begins from scratch"), ({"dataset": "none"}, "no data set 'none'"), ({"n_head": 3}, "n_head=3 does not divide"),
    ({"results": "."}, "results='.' cannot be")])
def test_what_a_ladder_cannot_do_is_one_line(go, changes, words):
    assert words in refusal(go, "toy.py", **changes) and Inside.begun == []


def test_a_ladders_folder_that_cannot_be_is_one_line(go):
    Path("file").write_text("")
    assert "out_dir='file/x' cannot be written" in refusal(go, "toy.py", out_dir="file/x", jobs=0)


def test_a_rung_named_twice_in_a_ladder_is_refused(go):
    assert "toy.py is named twice" in refusal(go, "toy.py", "./toy.py")


# ------------------------------------------------------------------------------------------------------------- config/ladder

FREE = set(GPTConfig.__dataclass_fields__) - {"block", "vocab_size", "block_size", "n_embd", "n_head", "n_kv_head", "n_ffn", "dropout"}
SHORTER = {"routers": 5}                                                  # mor_tiny's shape


@pytest.mark.parametrize("folder", LADDERS, ids=lambda folder: folder.name)
def test_the_rungs_of_a_ladder_differ_in_the_loop_alone_and_execute_as_many_blocks(folder):
    settings = [train.parse([str(path)]) for path in sorted(folder.glob("*.py"))]
    assert len(settings) >= 4
    fixed = [{name: value for name, value in s.values.items() if name not in FREE} for s in settings]
    assert all(each == fixed[0] for each in fixed)
    blocks = {path.stem: s.build(GPTConfig, vocab_size=320).executed_blocks() for path, s in zip(sorted(folder.glob("*.py")), settings)}
    assert {n for name, n in blocks.items() if "half" not in name} == {SHORTER.get(folder.name, 6)}
    assert len({bench.fingerprint({name: s.values[name] for name in FREE}) for s in settings}) == len(settings)


def test_the_rungs_of_a_ladder_are_numbered_in_order():
    for folder in LADDERS:
        numbers = [int(path.name.split("_")[0]) for path in sorted(folder.glob("*.py"))]
        assert numbers == list(range(1, len(numbers) + 1)), folder
