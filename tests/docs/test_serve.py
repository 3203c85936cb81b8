"""The scripts of docs/serve.md: a server of two ranks that is asked, left, asked again, and ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from autotp.ranks import RankPool
from tests.docs.test_readme import ROOT, blocks, environment

pytestmark = pytest.mark.slow
SERVE, DECODE = (body for mark, _, body in blocks((ROOT / "docs" / "serve.md").read_text()) if "torchrun" in mark)
SECONDS = 240.0
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model in float64, which reads bytes."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("weights")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=128, initializer_range=0.5, eos_token_id=None,
        dtype="float64",
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).double().save_pretrained(folder)
    return folder


class Server:
    """torchrun with the script in a folder of its own."""

    def __init__(self, folder: Path, weights: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder / "serve.py").write_text(SERVE)
        self.out = folder / "out.txt"
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options, "serve.py"]
        env = {**environment(), "MODEL_FOLDER": str(weights), "PORT": str(self.port), "CUDA_VISIBLE_DEVICES": ""}
        with self.out.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", *words], cwd=folder, env=env, stdout=out, stderr=out)

    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until it has said so."""
        end = time.monotonic() + SECONDS
        while self.said().count(text) < times:
            assert self.process.poll() is None and time.monotonic() < end, self.said()
            time.sleep(0.1)

    def ask(self, **request: Any) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer."""
        data = json.dumps(request).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}", data, timeout=SECONDS) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def rank(self, rank: int) -> int:
        """The process of a rank."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = f"\0RANK={rank}\0".encode()
        return next(int(child) for child in children if own in Path(f"/proc/{child}/environ").read_bytes())


@contextmanager
def serving(folder: Path, weights: Path, *options: str) -> Iterator[Server]:
    server = Server(folder, weights, *options)
    try:
        server.wait_for("ready on")
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
        server.process.wait(60)


def unsharded(weights: Path, new: int) -> list[int]:
    """The tokens of the whole model."""
    import transformers

    ids = transformers.AutoTokenizer.from_pretrained(weights)(PROMPT, return_tensors="pt")["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(weights).eval()
    return model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :].tolist()


def test_it_answers_whoever_asks_and_ends_when_told(tmp_path: Path, weights: Path) -> None:
    expected = unsharded(weights, 12)
    assert len(set(expected)) > 4
    with serving(tmp_path, weights) as server:
        status, answer = server.ask(prompt=PROMPT, max_new_tokens=12)
        assert (status, answer["ids"]) == (200, expected)
        assert isinstance(answer["text"], str)
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:  # asks, and does not wait
            body = json.dumps({"prompt": PROMPT}).encode()
            leaving.sendall(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        for given in ({"prompt": ""}, {"prompt": PROMPT, "num_beams": -3}, {"prompt": PROMPT, "max_new_tokens": 1024}):
            assert server.ask(**given)[0] == 400
        answers: list[Any] = []
        asking = [Thread(target=lambda: answers.append(server.ask(prompt=PROMPT, max_new_tokens=12))) for _ in range(3)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert [a["ids"] for _, a in answers] == [expected] * 3
        drawn = [server.ask(prompt=PROMPT, max_new_tokens=12, do_sample=True, temperature=2)[1]["ids"] for _ in "ab"]
        assert drawn[0] != drawn[1]
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
    assert len(re.findall(r"rank \d has ended", server.said())) == 2, server.said()


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="finds a rank in /proc")
def test_when_a_rank_dies_all_end(tmp_path: Path, weights: Path) -> None:
    with serving(tmp_path, weights) as server:
        os.kill(server.rank(1), signal.SIGKILL)
        assert server.process.wait(60) == 1
    with pytest.raises(OSError):
        server.ask(prompt=PROMPT)


def test_a_loop_of_your_own(ranks: RankPool) -> None:
    mesh = 'init_device_mesh("cpu", (2,))'
    assert mesh in DECODE
    ranks.run("tests.docs.run_script:on_two_ranks", DECODE.replace(mesh, "mesh_of(2)"), timeout=SECONDS)
