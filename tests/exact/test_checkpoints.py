"""Checkpoints: training goes on as if it had not been interrupted, on other ranks too; nothing on disk is lost."""

from __future__ import annotations

import os
import signal
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import autotp
from autotp.ranks import RankError, RankPool
from tests.exact.checkpoint_tasks import Pair, built

pytestmark = pytest.mark.slow
SECONDS = 300.0
TASKS = "tests.exact.checkpoint_tasks"


@pytest.mark.parametrize(
    ("model", "saved", "asynchronous"),
    [("uneven", "tp=4", False), ("llama tied", "tp=4", True), ("hf:phi3", "2x2", False)],
)
def test_the_next_losses_are_those_of_an_uninterrupted_run(
    ranks: RankPool, tmp_path: Path, model: str, saved: str, asynchronous: bool
) -> None:
    shapes = ["tp=2", "tp=1", "2x2", "unsharded"] if saved == "tp=4" else ["tp=4"]
    shapes += ["2x2 on_meta", "tp=2 meta", "unsharded on_meta"] if saved == "tp=4" else ["tp=4 on_meta"]
    payload = {"model": model, "saved": saved, "folder": str(tmp_path), "asynchronous": asynchronous, "shapes": shapes}
    answers = ranks.run(f"{TASKS}:resumed", payload, timeout=SECONDS)
    for rank, answer in enumerate(answers):
        assert answer["saved"] == pytest.approx(answer["expected"], rel=1e-12, abs=1e-12)
        assert answer["path"].endswith("00000001")
        for shape in shapes:
            if shape not in answer:
                assert rank >= 1
                continue
            assert answer[shape]["losses"] == pytest.approx(answer["expected"][2:], rel=1e-12, abs=1e-12), shape
            assert answer[shape]["step"] == 2
            assert answer[shape]["draw"], shape
    assert set(shapes) <= set(answers[0])
    assert abs(answers[0]["expected"][3] - answers[0]["expected"][2]) > 1e-6, "steps change the loss"


def test_what_goes_wrong_is_said_on_all_ranks_and_nothing_is_lost(ranks: RankPool, tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = ranks.run(f"{TASKS}:faults", str(tmp_path / "run"), timeout=SECONDS)
    only = answers[2]["one rank"]
    assert "rank 0, 1, 3 did not call autotp.save" in only["error"] and only["seconds"] < 30
    for answer in answers:
        assert "all ranks must make the same call" in answer["another folder"]["error"]
        for case in ("full disk", "full disk later"):
            assert "No space left on device" in answer[case]["error"], case
        assert "was raised before" in answer["said once"]["error"]
        assert answer["after"] == 1.0
        assert answer["left"] == ["00000001"], "no half written checkpoint stays"
        assert answer["second"] == 2.0
        assert "__2_0.distcp is truncated" in answer["truncated"]["error"]
        assert "__2_0.distcp is missing" in answer["missing"]["error"]
        assert "00000001 is there too" in answer["missing"]["error"]
        assert answer["untouched"] == 0.0
        assert answer["older"] == 1.0
        assert {answer[c]["kind"] for c in ("full disk", "truncated", "missing")} == {"CheckpointError"}
    assert "rank 1: " in answers[0]["full disk"]["error"]


def test_a_rank_that_is_killed_while_it_writes_is_missed(tmp_path: Path) -> None:
    with RankPool(2, timeout=SECONDS, imports=("autotp.sharding",)) as two, pytest.raises(RankError):
        two.run(f"{TASKS}:killed", str(tmp_path))
    told = literal_eval((tmp_path / "told").read_text())
    assert "rank 1 did not get through write" in told["error"] and told["seconds"] < 60
    model = Pair().double()
    autotp.resume(model, tmp_path)
    assert float(model.up.weight.detach().min()) == float(model.up.weight.detach().max()) == 1.0
    assert [p.name for p in tmp_path.glob("*[0-9]*")] == ["00000001"]


# ---- killed at every moment, in a process without others


MOMENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open", "os.scandir", "shutil.rmtree")


def _killed_at(moment: int, folder: Path) -> bool:
    """Save in a child that is killed before the given call into the file system; whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def audit(event: str, args: tuple[Any, ...]) -> None:
            nonlocal count
            if event in MOMENTS and any(str(folder) in str(a) for a in args):
                count += 1
                if count > moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            model = _filled(3.0)
            sys.addaudithook(audit)
            autotp.save(model, folder, keep=2)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def _filled(value: float) -> Pair:
    model = Pair()
    for p in model.parameters():
        torch.nn.init.constant_(p, value)
    return model


def test_killed_at_any_moment_the_newest_complete_one_is_there(tmp_path: Path) -> None:
    moments = 0
    while True:
        folder = tmp_path / str(moments)
        for value in (1.0, 2.0):
            autotp.save(_filled(value), folder)
        killed = _killed_at(moments, folder)
        model = _filled(0.0)
        autotp.resume(model, folder)
        seen = {float(x) for p in model.parameters() for x in p.detach().flatten()}
        assert len(seen) == 1 and seen <= ({2.0, 3.0} if killed else {3.0})
        autotp.save(_filled(4.0), folder, keep=1)
        assert [p.name for p in folder.iterdir()] == ["00000004" if seen == {3.0} else "00000003"]
        if not killed:
            break
        moments += 1
    assert moments >= 8, "files are made, renamed and removed"


# ---- ordinary files


@pytest.mark.parametrize(
    ("model", "shape"), [("uneven", "tp=4"), ("llama tied", "2x2"), ("hf:phi3", "tp=4"), ("mixtral", "tp=4")]
)
def test_exported_files_are_those_of_the_unsharded_model(
    ranks: RankPool, tmp_path: Path, model: str, shape: str
) -> None:
    payload = {"model": model, "shape": shape, "folder": str(tmp_path), "bytes": 100_000 if model != "uneven" else 8000}
    answers = ranks.run(f"{TASKS}:exported", payload, timeout=SECONDS)
    expected, _, _ = built(model)
    for answer in answers:
        assert "holds something already" in answer["again"]["error"]
        assert "No space left" in answer["disk"]["error"]
        assert answer["left"] == ["out"]
        assert answer["largest"] == max(t.numel() * t.dtype.itemsize for t in expected.state_dict().values())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and (tmp_path / "out" / "model.safetensors.index.json").is_file()
    found = {key: value for file in files for key, value in load_file(file).items()}
    if model == "uneven":
        assert found.keys() == expected.state_dict().keys()
        assert all(torch.equal(found[key], value) for key, value in expected.state_dict().items())
        return
    expected.save_pretrained(tmp_path / "theirs")
    theirs = {k: v for f in (tmp_path / "theirs").glob("*.safetensors") for k, v in load_file(f).items()}
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[key], value) for key, value in theirs.items())
    read = type(expected).from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert all(torch.equal(value, read.state_dict()[key]) for key, value in expected.state_dict().items())


def test_what_a_process_alone_exports_is_loaded(tmp_path: Path) -> None:
    model, other = _filled(3.0), _filled(0.0)
    model.odd = torch.nn.Parameter(torch.arange(3).to(torch.bfloat16), requires_grad=False)
    autotp.export(model, tmp_path / "new" / "out")
    read = load_file(tmp_path / "new" / "out" / "model.safetensors")
    assert torch.equal(read.pop("odd"), model.odd)
    other.load_state_dict(read)
    assert float(other.up.weight.detach().min()) == 3.0
