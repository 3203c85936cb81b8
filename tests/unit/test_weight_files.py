"""Opening weight files, reading slices of them, and everything that can be wrong with a file."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from autotp import stored as slices
from autotp.errors import AutotpError, WeightsError
from autotp.parts import pieces
from autotp.weight_files import open_weights

TENSORS = {
    "up.weight": torch.arange(96.0).view(12, 8),
    "experts": torch.arange(120, dtype=torch.bfloat16).view(4, 6, 5),
    "scale": torch.tensor(3.0, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
    "odd": torch.arange(5, dtype=torch.int64),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


def whole(stored):
    return stored.read((None,) * len(stored.shape))


def header_of(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path, header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def error(path, *words):
    with pytest.raises(WeightsError) as caught:
        open_weights(path)
    for word in words:
        assert str(word) in str(caught.value)
    return str(caught.value)


# -- reading


def test_everything_is_read_as_it_was_written(file):
    stored = open_weights(file)
    assert set(stored) == set(TENSORS)
    for key, tensor in TENSORS.items():
        got = whole(stored[key])
        assert got.dtype == tensor.dtype == stored[key].dtype
        assert got.shape == tensor.shape == torch.Size(stored[key].shape)
        assert torch.equal(got, tensor)


@st.composite
def wants(draw, shape):
    want = []
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
        ranges = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if b > a]
        want.append(draw(st.one_of(st.none(), st.permutations(ranges).map(tuple))))
    return tuple(want)


@pytest.mark.parametrize("long_run", [1, 1 << 16], ids=["run by run", "mapped"])
@pytest.mark.parametrize("key", ["up.weight", "experts", "odd"])
@given(data=st.data())
@settings(max_examples=40)
def test_slices(tmp_path_factory, key, long_run, data):
    path = tmp_path_factory.mktemp("slices") / "model.safetensors"
    save_file(TENSORS, path)
    want = data.draw(wants(TENSORS[key].shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "_LONG_RUN", long_run)
        got = open_weights(path)[key].read(want)
    assert torch.equal(got, pieces(TENSORS[key], want))
    assert got.is_contiguous()


def test_tensors_that_lie_at_odd_bytes(tmp_path):
    values = torch.arange(12.0).view(3, 4)
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [1, 49]},
    }
    path = with_header(tmp_path / "odd.safetensors", header, b"\7" + values.numpy().tobytes())
    assert path.stat().st_size - 48 & 1
    assert torch.equal(open_weights(path)["w"].read((None, ((1, 3),))), values[:, 1:3])


def test_a_rank_reads_its_bytes_and_no_others(file, monkeypatch):
    read = []
    original = slices.InSafetensors._read_runs

    def counted(self, opened, want, out):
        read.extend(self._runs(want))
        return original(self, opened, want, out)

    monkeypatch.setattr(slices.InSafetensors, "_read_runs", counted)
    monkeypatch.setattr(slices, "_LONG_RUN", 1)
    open_weights(file)["experts"].read((None, ((1, 2), (4, 6)), None))
    assert read == [(60 * e + 10 * a, 10 * n) for e in range(4) for a, n in ((1, 1), (4, 2))]


# -- files and folders


def sharded(folder, index=True):
    names = {"a.safetensors": ["up.weight", "scale"], "b.safetensors": ["experts"]}
    for name, keys in names.items():
        save_file({key: TENSORS[key] for key in keys}, folder / name)
    where = {key: name for name, keys in names.items() for key in keys}
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


@pytest.mark.parametrize("index", [True, False])
def test_a_folder_of_several(tmp_path, index):
    where = sharded(tmp_path, index)
    stored = open_weights(tmp_path)
    assert {key: s.file.name for key, s in stored.items()} == where
    assert torch.equal(whole(stored["experts"]), TENSORS["experts"])


def test_a_folder_of_one_a_list_and_an_index(tmp_path, file):
    assert set(open_weights(file.parent)) == set(open_weights(str(file))) == set(TENSORS)
    (tmp_path / "parts").mkdir()
    where = sharded(tmp_path / "parts")
    assert set(open_weights([tmp_path / "parts" / "a.safetensors"])) == {"up.weight", "scale"}
    assert set(open_weights(tmp_path / "parts" / "model.safetensors.index.json")) == set(where)


def test_safetensors_are_preferred_and_pickles_read_where_there_are_none(tmp_path, file):
    torch.save({"other": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert "other" not in open_weights(tmp_path)
    file.unlink()
    assert torch.equal(whole(open_weights(tmp_path)["other"]), torch.ones(2))


def test_a_pickle_is_mapped_and_sliced(tmp_path):
    torch.save({"w": TENSORS["up.weight"].t()}, tmp_path / "model.pt")
    stored = open_weights(tmp_path / "model.pt")["w"]
    assert torch.equal(stored.read((((2, 5),), ((0, 1), (4, 6)))), TENSORS["up.weight"].t()[2:5, [0, 4, 5]])


# -- what is wrong with a path


def test_nothing_there(tmp_path):
    error(tmp_path / "model.safetensors", tmp_path / "model.safetensors", "no such file")
    (tmp_path / "config.json").write_text("{}")
    error(tmp_path, tmp_path, "no weight file", "config.json")
    error([], "empty")
    error(tmp_path / "config.json", ".safetensors", "config.json")


def test_two_indices(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    error(tmp_path, "a.safetensors.index.json", "b.safetensors.index.json", "pass the path of one")


def test_a_key_in_two_files(tmp_path):
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    error(tmp_path, "w is both", "a.safetensors", "b.safetensors")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gone": "c.safetensors"}, ("gone", "c.safetensors", "no such file")),
        ({"gone": "a.safetensors"}, ("gone is not in", "a.safetensors", "index.json")),
        ({"scale": None}, ("scale is in", "a.safetensors", "not according to")),
        ({"scale": "b.safetensors"}, ("scale", "safetensors")),
        ({"gone": "../a.safetensors"}, ("gone", "folder")),
        ({"gone": 3}, ("weight_map",)),
    ],
)
def test_an_index_that_does_not_fit(tmp_path, changes, words):
    where = {key: name for key, name in {**sharded(tmp_path), **changes}.items() if name is not None}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    error(tmp_path, *words)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[]", b'{"weights": 1}'])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    error(tmp_path, "model.safetensors.index.json")


# -- what is wrong with a file


@pytest.mark.parametrize("left", [0, 4, 8, 100])
def test_a_header_cut_short(file, left):
    file.write_bytes(file.read_bytes()[:left])
    error(file, file, left)


def test_a_file_cut_short_names_the_key_that_suffers(file):
    header, _ = header_of(file)
    header.pop("__metadata__", None)
    last = max((k for k in header if header[k]["data_offsets"][1] > 0), key=lambda k: header[k]["data_offsets"][1])
    file.write_bytes(file.read_bytes()[:-1])
    error(file, file, "truncated", last)


def test_a_file_that_goes_on(file):
    file.write_bytes(file.read_bytes() + b"more")
    error(file, file, "corrupted")


@pytest.mark.parametrize("text", [b"no json!", b"\xff\xff", b"[1]", b'"text"', b'{"w": 1, "w": 2}'])
def test_a_header_that_is_none(tmp_path, text):
    error(with_header(tmp_path / "m.safetensors", text, b""), "m.safetensors", "corrupted")


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (3, ("corrupted",)),
        ({"dtype": "F32", "shape": [2]}, ("corrupted",)),
        ({**GOOD, "shape": [-2]}, ("corrupted",)),
        ({**GOOD, "shape": "2"}, ("corrupted",)),
        ({**GOOD, "shape": [3]}, ("12 bytes", "0 to 8")),
        ({**GOOD, "dtype": "F64"}, ("16 bytes",)),
        ({**GOOD, "dtype": "Q9"}, ("'Q9'", "F32")),
        ({**GOOD, "data_offsets": [8, 0]}, ("corrupted",)),
        ({**GOOD, "data_offsets": [4, 12]}, ("truncated",)),
        ({**GOOD, "data_offsets": [0, 8, 9]}, ("corrupted",)),
    ],
)
def test_an_entry_that_is_wrong(tmp_path, entry, words):
    error(with_header(tmp_path / "m.safetensors", {"w": entry}, b"\0" * 8), "m.safetensors", "w", *words)


def test_tensors_that_overlap_or_leave_gaps(tmp_path):
    for start in (4, 12):
        entries = {"v": GOOD, "w": {**GOOD, "data_offsets": [start, start + 8]}}
        path = with_header(tmp_path / "m.safetensors", entries, b"\0" * (start + 8))
        error(path, "w begins", "m.safetensors")


def test_a_file_that_becomes_shorter_while_it_is_read(file):
    stored = open_weights(file)
    file.write_bytes(file.read_bytes()[:-200])
    key = max(stored, key=lambda k: stored[k].start)
    for want in ((None,) * len(stored[key].shape), (*(None,) * (len(stored[key].shape) - 1), ((1, 3),))):
        with pytest.raises(WeightsError, match=key):
            stored[key].read(want)


def test_a_file_that_is_taken_away(file):
    stored = open_weights(file)
    file.unlink()
    with pytest.raises(WeightsError, match=r"up.weight cannot be read"):
        whole(stored["up.weight"])


# -- pickles


class Trap:
    def __reduce__(self):
        return print, ("pickled code ran",)


def test_code_in_a_pickle_is_not_run(tmp_path, capsys):
    torch.save({"w": Trap()}, tmp_path / "model.bin")
    error(tmp_path / "model.bin", "model.bin", "weights_only")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(1)], ("list", "state dict")),
        ({"model": {"w": torch.ones(1)}}, ("'model'", "dict", "state_dict")),
        ({1: torch.ones(1)}, ("1", "state_dict")),
        ({"w": torch.ones(1), "step": 3}, ("'step'", "int")),
    ],
)
def test_a_pickle_of_something_else(tmp_path, content, words):
    torch.save(content, tmp_path / "model.pt")
    error(tmp_path / "model.pt", "model.pt", *words)


def test_pickles_that_cannot_be_mapped_or_are_broken(tmp_path):
    path = tmp_path / "old.bin"
    torch.save({"w": torch.ones(100)}, path, _use_new_zipfile_serialization=False)
    error(path, "old.bin", "mmap")
    torch.save({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-300])
    error(path, "old.bin")
    path.write_bytes(b"")
    error(path, "old.bin")


def test_the_errors_are_autotps():
    assert issubclass(WeightsError, AutotpError)
    assert issubclass(WeightsError, ValueError)
