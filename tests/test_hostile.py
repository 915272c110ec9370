"""What strangers wrote into our files prints, reads and allocates nothing: one sentence, exit 2."""

import resource
import time
import zipfile

import pytest
import torch
from helpers import needs_rescue, refused

import checkpoint
import report
import train

ESCAPES = "x\x1b]0;owned\x07\x1b[2J\u202e"


@pytest.fixture(scope="module")
def written(image_folder, tmp_path_factory):
    """Loads "last" or "bad_step" of a run: last.pt, a capsule."""
    folder = tmp_path_factory.mktemp("written") / "run"
    words = (
        f"--model cifarnet-tiny --dataset cifar10 --data-dir {image_folder} --batch-size 40 "
        f"--max-steps 4 --precision fp32 --device cpu --inject nan:input@step=2 --log-every 1 "
        f"--out-dir {folder}"
    )
    assert train.main(words.split()) == 0
    return lambda name: checkpoint.load(next(folder.glob(f"{name}*.pt")))


def laughs():
    tree = [1] * 10
    for _ in range(12):
        tree = [tree] * 10
    return tree


def put(*places_and_value):
    *places, key, value = places_and_value

    def edit(state):
        for place in places:
            state = state[place]
        state[key] = value() if callable(value) else value

    return edit


HOSTILE = {  # name: (file, edit)
    "ten to the thirteenth ones": ("last", put("identity", "x", laughs)),
    "a trillion images": ("last", put("identity", "images", 10**12)),
    "text for the terminal": ("last", put("identity", "model", ESCAPES * 10**6)),
    "a name for the terminal": ("last", put("model", ESCAPES, lambda: torch.ones(1))),
    "a score's name": ("last", put("scores", ESCAPES, 1.0)),
    "200,000 scores": ("last", put("scores", lambda: {f"x{i}": 1.0 for i in range(200_000)})),
    "200,000 losses": ("last", put("healing", "trend", "first", lambda: [1.0] * 200_000)),
    "a best score of 1e300": ("last", put("best", 1e300)),
    "trouble looked at for ever": ("last", put("healing", "hunt_until", 10**15)),
    "trouble passed over for ever": ("last", put("healing", "examined_until", 10**15)),
    "200,000 cures": ("last", put("healing", "cures", lambda: ["not reproducible"] * 200_000)),
    "a verdict's name": (
        "last",
        put("guard", "pending", lambda: [4, [0.0] * 45, ["loss", "grad_norm", ESCAPES]]),
    ),
    "no indices": ("bad_step", put("record", "indices", [])),
    "short indices": ("bad_step", put("record", "indices", [[1]])),
    "no batch": ("bad_step", lambda state: state["record"].update(batches=[], indices=[])),
    "an empty image": (
        "bad_step",
        put("record", "batches", lambda: [(torch.ones(1, 3, 0, 0), torch.zeros(1).long())]),
    ),
    "200,000 classes": ("bad_step", put("class_names", lambda: [str(i) for i in range(200_000)])),
    "another number of classes": ("bad_step", put("num_classes", 9)),
    "a capsule's identity": ("bad_step", put("state", "identity", "model", ESCAPES)),
    "a capsule's weights": ("bad_step", put("state", "model", ESCAPES, lambda: torch.ones(1))),
    "a capsule's fault": ("bad_step", put("inject", ESCAPES)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_strangers_file_is_one_sentence(name, written, run, tmp_path):
    file, edit = HOSTILE[name]
    state = written(file)
    edit(state)
    path = tmp_path / "stranger.pt"
    torch.save(state, path)
    began, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = run("--replay" if file == "bad_step" else "--resume", path)
    assert time.process_time() - began < 20  # a second or two; a loop over all has no end
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1e6  # KB
    refused(answer)
    assert answer[2].strip().isprintable() and len(answer[2]) < 1200
    assert not run.folder.exists()


@needs_rescue
def test_the_verdict_of_a_capsule_cannot_command_the_terminal(written, tmp_path, capsys):
    state = written("bad_step")
    put("verdict", ESCAPES)(state)
    torch.save(state, tmp_path / "stranger.pt")
    assert train.main(["--replay", str(tmp_path / "stranger.pt")]) == 1
    out = capsys.readouterr().out
    assert "recorded verdict: x\\x1b]0;owned\\x07" in out and out.replace("\n", "").isprintable()


def test_records_that_lie_at_one_place_do_not_make_a_small_file_a_large_state(tmp_path):
    torch.save({"x": torch.ones(2**16)}, tmp_path / "small.pt")
    with zipfile.ZipFile(tmp_path / "small.pt", "a") as archive:
        data = next(record for record in archive.infolist() if record.file_size >= 2**18)
        for i in range(100):
            twin = zipfile.ZipInfo(f"small/data/{i + 1}")
            for name in ("CRC", "file_size", "compress_size", "header_offset"):
                setattr(twin, name, getattr(data, name))
            archive.filelist.append(twin)
        archive._didModify = True
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        checkpoint.load(tmp_path / "small.pt")


def test_a_log_of_gigabytes_is_refused_at_once(run, tmp_path, monkeypatch):
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        file.truncate(8 * 2**30)  # a sparse file
    with pytest.raises(OSError, match="not the log of a run"):
        report.read_lines(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(report, "LONGEST", 1)
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text("{}")
    refused(run(), "not the log of a run")


def test_numbers_that_are_none_make_gaps_in_the_curves(tmp_path):
    lines = '{"step": 1, "loss": 1%s}\n{"step": 1%s, "loss": 2}\n{"step": 2, "loss": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(lines % ("0" * 400, "0" * 400))
    assert len(report.read_lines(tmp_path / "metrics.jsonl")) == 2
    pytest.importorskip("matplotlib")
    assert report.draw_curves(tmp_path / "metrics.jsonl").exists()
