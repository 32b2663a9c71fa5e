"""torch_dist checkpoints: the recorded ones are read bit-equal without torch, hostile ones are one message."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from golden.megatron_weights import recorded, unpack_checkpoints
from safetensors.numpy import load_file

from jmegatron.errors import UsageError
from jmegatron.interop import safe_pickle, torch_dist
from jmegatron.interop.safe_pickle import Foreign
from jmegatron.interop.torch_dist import StoredTensor, TorchDistReader, write

CHECKPOINTS = {
    "gpt_gelu_tp1": "gpt_gelu",
    "gpt_gelu_tp2": "gpt_gelu",
    "gpt_gelu_pp2": "gpt_gelu",
    "llama_like_tp1": "llama_like",
    "moe_ep2": "moe",
}
TINY = "gpt_tiny_distopt_dp2_fully_reshardable"
FLAT = "gpt_tiny_distopt_dp2_dp_reshardable"
RENAMED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    for model in ("gpt_gelu", "llama_like", "moe", "gpt_tiny"):
        unpack_checkpoints(model, path)
    return path


def by_layer(reader: TorchDistReader) -> dict[str, np.ndarray]:
    """The tensors by the names of `state_dict`, written out here anew: a layer each, an expert each."""
    found = {}
    for key in reader.tensors:
        if key.startswith("optimizer."):
            continue
        array, name = reader.read(key), key
        for theirs, plain in RENAMED.items():
            name = name.replace(theirs, plain)
        if not name.startswith("decoder.layers."):
            found[name] = array
            continue
        for layer in range(len(array)):
            own = name.replace("decoder.layers.", f"decoder.layers.{layer}.")
            if ".experts.experts." in own:
                for expert in range(array.shape[1]):
                    linear = own.replace(".experts.experts.", f".experts.local_experts.{expert}.")
                    found[linear] = array[layer, expert]
            else:
                found[own] = array[layer]
    return found


# ---- reading ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_recorded_checkpoint_reads_bit_equal_to_the_weights_it_was_made_of(name: str, folder: Path) -> None:
    got, expected = by_layer(TorchDistReader(folder / name)), recorded(CHECKPOINTS[name], "weights")
    assert got.keys() == expected.keys()
    for key in expected:
        assert got[key].dtype == expected[key].dtype
        np.testing.assert_array_equal(got[key], expected[key], err_msg=key)


@pytest.mark.parametrize("name", ["gpt_gelu_tp1", "gpt_gelu_pp2", "llama_like_tp1", TINY, FLAT])
def test_a_recorded_checkpoint_reads_bit_equal_to_what_each_rank_held(name: str, folder: Path) -> None:
    got = by_layer(TorchDistReader(folder / name))
    ranks = [load_file(path) for path in sorted((folder / name).glob("plain_rank*.safetensors"))]
    expected = {key: value for rank in ranks for key, value in rank.items()}
    expected.pop("output_layer.weight", None) if name == "gpt_gelu_pp2" else None  # the last stage's tied copy
    assert got.keys() == expected.keys()
    for key in expected:
        np.testing.assert_array_equal(got[key], expected[key], err_msg=key)


@pytest.mark.parametrize("name", ["gpt_gelu_tp2", "moe_ep2", FLAT])
def test_one_index_is_that_index_of_the_whole(name: str, folder: Path) -> None:
    reader = TorchDistReader(folder / name)
    for key, (shape, _) in reader.tensors.items():
        for index in {0, shape[0] - 1}:
            np.testing.assert_array_equal(reader.read(key, index), reader.read(key)[index])


def test_one_index_reads_only_the_chunks_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read = TorchDistReader(folder / "gpt_gelu_tp2"), []
    original = TorchDistReader._bytes
    monkeypatch.setattr(TorchDistReader, "_bytes", lambda self, chunk: read.append(chunk) or original(self, chunk))
    key = "decoder.layers.self_attention.linear_qkv.weight"
    reader.read(key, 2)
    assert [(chunk.offsets, chunk.sizes) for chunk in read] == [((2, 0, 0), (1, 96, 64)), ((2, 96, 0), (1, 96, 64))]
    with pytest.raises(ValueError, match="has no index 4"):
        reader.read(key, 4)


def test_what_ranks_share_is_plain(folder: Path) -> None:
    reader = TorchDistReader(folder / TINY)
    assert reader.folder.name == "iter_0000003"
    assert TorchDistReader(reader.folder).tensors == reader.tensors
    assert reader.common["iteration"] == 3
    assert reader.common["checkpoint_version"] == 3.0
    assert reader.common["args"]["hidden_size"] == 32
    assert reader.common["args"]["consumed_train_samples"] == 24
    assert reader.common["opt_param_scheduler"]["num_steps"] == 24
    assert [group["step"] for group in reader.common["optimizer"]["optimizer"]["param_groups"]] == [3.0, 3.0]
    assert sum("_extra_state" in name for name in reader.objects) == 8


def test_reading_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from jmegatron.interop.torch_dist import TorchDistReader;"
        f"r = TorchDistReader({str(folder / TINY)!r}); [r.read(name) for name in r.tensors];"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_two_forms_of_the_optimizers_state_hold_the_same_numbers(folder: Path) -> None:
    """Two recordings of one run: flat buckets, with whatever stood in memory as padding, and by name."""
    named, flat = TorchDistReader(folder / TINY), TorchDistReader(folder / FLAT)
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        parts = [named.read(key).ravel() for key in named.tensors if key.startswith(f"optimizer.state.{kind}.")]
        (bucket,) = [flat.read(key) for key in flat.tensors if key.endswith(f".{kind}")]
        assert len(np.unique(np.concatenate(parts))) > 20_000
        assert np.isin(np.concatenate(parts), bucket).all()


def test_common_state_may_lie_among_the_chunks(folder: Path, tmp_path: Path, forge: Any) -> None:
    """As later versions write it; made of a recorded checkpoint here, as none of them is recorded."""
    path = copied(folder, tmp_path)
    data = (path / "common.pt").read_bytes()
    (path / "common.pt").unlink()
    with open(path / "__0_0.distcp", "ab") as file:
        start = file.tell()
        file.write(data)
    name = "common_state/shard_0_1"
    index = Foreign("torch.distributed.checkpoint.metadata.MetadataIndex", (), {"fqn": name, "offset": None})
    place = {"relative_path": "__0_0.distcp", "offset": start, "length": len(data)}

    def change(metadata: dict[str, Any]) -> None:
        kind = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"
        metadata["state_dict_metadata"][name] = Foreign(kind, (), {})
        metadata["storage_data"][index] = Foreign("torch.distributed.checkpoint.filesystem._StorageInfo", (), place)

    forge(change)
    reader = TorchDistReader(path)
    assert reader.common["args"]["hidden_size"] == 64
    assert name not in reader.objects


# ---- hostile folders ----------------------------------------------------------------------------------------------
def copied(folder: Path, tmp_path: Path, name: str = "gpt_gelu_tp2") -> Path:
    shutil.copytree(folder / name, tmp_path / "copy")
    return next((tmp_path / "copy").glob("iter_*"))


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Changes what .metadata says, as a person could who writes such a file."""

    def use(change: Callable[[dict[str, Any]], None]) -> None:
        original = safe_pickle.loads

        def loads(data: bytes, known: Any, *, where: str, **options: Any) -> Any:
            found = original(data, known, where=where, **options)
            if where.endswith(".metadata"):
                change(found.state)
            return found

        monkeypatch.setattr(torch_dist.safe_pickle, "loads", loads)

    return use


KEY = "decoder.layers.self_attention.linear_qkv.weight"


def _places(metadata: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for index, info in metadata["storage_data"].items():
        if index.state["fqn"] == KEY:
            yield index.state, info.state


def _place(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda metadata: next(_places(metadata))[1].update(values)


def _entry(metadata: dict[str, Any]) -> dict[str, Any]:
    return metadata["state_dict_metadata"][KEY].state


def _dtype(name: str) -> Callable[[dict[str, Any]], None]:
    def change(metadata: dict[str, Any]) -> None:
        properties = _entry(metadata)["properties"]
        properties.state = (Foreign(name), *properties.state[1:])

    return change


def _move_chunk(metadata: dict[str, Any]) -> None:
    """Puts the chunk at row 96 of layer 0 to row 0 of it, with a place."""
    chunk = next(c for c in _entry(metadata)["chunks"] if c.state["offsets"] == (0, 96, 0))
    chunk.state["offsets"] = (0, 95, 0)
    next(index for index, _ in _places(metadata) if index["offset"] == (0, 96, 0))["offset"] = (0, 95, 0)


def _share_bytes(metadata: dict[str, Any]) -> None:
    first, second = [place for _, place in _places(metadata)][:2]
    first.update(second)


def _drop_chunk(metadata: dict[str, Any]) -> None:
    chunk = _entry(metadata)["chunks"].pop()
    offsets = chunk.state["offsets"]
    storage = metadata["storage_data"]
    for index in [i for i in storage if i.state["fqn"] == KEY and i.state["offset"] == offsets]:
        del storage[index]


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a path above": (_place(relative_path="../x"), "expected the name of a file in the folder"),
    "an absolute path": (_place(relative_path="/etc/passwd"), "expected the name of a file in the folder"),
    "a hidden file": (_place(relative_path=".metadata"), "expected the name of a file in the folder"),
    "a path with a zero": (_place(relative_path="a\0b"), "expected the name of a file in the folder"),
    "a path that is no text": (_place(relative_path=3), "expected the name of a file in the folder"),
    "a file that is not there": (_place(relative_path="__7_0.distcp"), "is missing"),
    "a negative offset": (_place(offset=-1), "a chunk lies at -1"),
    "an offset behind the file": (_place(offset=10**9), "but a chunk ends at"),
    "a length of 2**60": (_place(length=2**60), "but a chunk ends at|two chunks lie at"),
    "an offset that is no number": (_place(offset="0"), "a chunk lies at '0'"),
    "a length of nothing": (_place(length=10), "has 10 bytes for its chunk"),
    "bytes of another chunk": (_share_bytes, "two chunks lie at byte"),
    "packed chunks": (_place(transform_descriptors=["zstd"]), "are packed by"),
    "chunks that overlap": (_move_chunk, "overlap"),
    "chunks that leave a hole": (_drop_chunk, "overlap or leave holes"),
    "a chunk that leaves the tensor": (lambda m: _entry(m).update(size=(3, 192, 64)), "which leaves it"),
    "a larger tensor": (lambda m: _entry(m).update(size=(5, 192, 64)), "overlap or leave holes"),
    "2**47 layers": (lambda m: _entry(m).update(size=(2**47, 192, 64)), "overlap or leave holes"),
    "a size of 2**62": (lambda m: _entry(m).update(size=(2**62, 192, 64)), "a size holds other things"),
    "a negative size": (lambda m: _entry(m).update(size=(-4, 192, 64)), "a size holds other things"),
    "a size of 17 dims": (lambda m: _entry(m).update(size=(1,) * 17), "no short list"),
    "no size": (lambda m: _entry(m).pop("size"), "'size' is missing"),
    "float8": (_dtype("torch.float8_e4m3fn"), "has dtype 'float8_e4m3fn'"),
    "a complex number": (_dtype("torch.complex64"), "has dtype 'complex64'"),
    "a class as dtype": (_dtype("os.system"), "has dtype 'os.system'"),
    "no place": (lambda m: m["storage_data"].clear(), "has 0 places|has no place"),
    "no description": (lambda m: m["state_dict_metadata"].pop(KEY), "is not described"),
    "a description of another kind": (
        lambda m: m["state_dict_metadata"].update({KEY: Foreign("os.system", ("x",))}),
        "got os.system, expected",
    ),
    "a list of tensors": (lambda m: m.update(state_dict_metadata=[]), "does not describe"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_description_is_refused_before_a_tensor_is_read(
    kind: str, folder: Path, forge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, what = FORGERIES[kind]
    forge(change)
    monkeypatch.setattr(TorchDistReader, "_bytes", lambda *_: pytest.fail("a chunk was read"))
    with pytest.raises(UsageError, match=what) as error:
        TorchDistReader(folder / "gpt_gelu_tp2")
    assert "gpt_gelu_tp2" in str(error.value)
    assert "fix: " in str(error.value)


def test_a_description_with_another_dtype_than_the_tensor_is_refused(folder: Path, forge: Any) -> None:
    forge(_dtype("torch.int32"))
    with pytest.raises(UsageError, match=r"got float32\[1, 96, 64\], expected int32"):
        TorchDistReader(folder / "gpt_gelu_tp2").read(KEY)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"])
@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder", "half", "nothing", "text"])
def test_a_file_that_is_none_of_a_checkpoint_is_refused(kind: str, name: str, folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path) / name
    data = path.read_bytes()
    path.unlink()
    if kind == "a link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.write_bytes({"half": data[: len(data) // 2], "nothing": b"", "text": b"cos\nsystem\n(X\0tR."}[kind])
    with pytest.raises(UsageError, match="fix: "):
        TorchDistReader(path.parent)


def test_a_changed_bit_of_a_tensor_is_noticed(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    chunk = TorchDistReader(path)._chunks[KEY][0]
    with open(path / chunk.file, "r+b") as file:
        file.seek(chunk.start + chunk.length // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 16]))
    with pytest.raises(UsageError, match="its checksum does not fit"):
        TorchDistReader(path).read(KEY)


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an empty folder": (lambda _: None, "got no checkpoint, expected latest_checkpointed_iteration.txt"),
    "the old format": (lambda p: (p / "mp_rank_00").mkdir(), "the old format torch"),
    "a tracker of words": (lambda p: (p / torch_dist.TRACKER).write_text("../../etc"), r"got '\.\./\.\./etc'"),
    "a long tracker": (lambda p: (p / torch_dist.TRACKER).write_text("1" * 100), "expected at most 64"),
    "a tracker without its step": (
        lambda p: (p / torch_dist.TRACKER).write_text("7"),
        "iter_0000007: has no .metadata",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_without_a_checkpoint_is_named(kind: str, tmp_path: Path) -> None:
    make, what = FOLDERS[kind]
    make(tmp_path)
    with pytest.raises(UsageError, match=what):
        TorchDistReader(tmp_path)


@pytest.mark.parametrize(
    "content", [{"sharded_backend": "zarr", "sharded_backend_version": 1}, {"sharded_backend": "torch_dist"}, []]
)
def test_another_format_is_named(content: Any, folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    (path / "metadata.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"got sharded_backend 'zarr'|does not say what the checkpoint's format is"):
        TorchDistReader(path)


# ---- hostile tensors ----------------------------------------------------------------------------------------------
def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def _number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def tensor_pickle(
    *,
    function: str = "torch._utils\n_rebuild_tensor_v2",
    storage: str = "torch\nFloatStorage",
    name: str = "storage",
    key: str = "0",
    count: int = 6,
    offset: int = 0,
    size: tuple[int, ...] = (2, 3),
    strides: tuple[int, ...] = (3, 1),
) -> bytes:
    """The pickle that torch.save makes of a tensor, opcode by opcode."""
    numbers = lambda values: b"(" + b"".join(map(_number, values)) + b"t"  # noqa: E731
    persistent = b"(" + _text(name) + b"c" + storage.encode() + b"\n" + _text(key) + _text("cpu") + _number(count)
    rest = b"\x89ccollections\nOrderedDict\n)R"
    return (
        b"\x80\x02c"
        + function.encode()
        + b"\n("
        + persistent
        + b"tQ"
        + _number(offset)
        + numbers(size)
        + numbers(strides)
    ) + (rest + b"tR.")


VALUES = np.arange(6, dtype="<f4")


def archive(
    pickle: bytes, *, compression: int = zipfile.ZIP_STORED, data: bytes = VALUES.tobytes(), **more: bytes
) -> bytes:
    """The zip that torch.save makes."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written:
        members = {"data.pkl": pickle, "byteorder": b"little", "data/0": data, "version": b"3\n"} | more
        for name, content in members.items():
            written.writestr(f"archive/{name}", content)
    return file.getvalue()


def test_the_forged_tensors_are_like_real_ones(folder: Path) -> None:
    got = torch_dist._tensor(archive(tensor_pickle()), "x")
    np.testing.assert_array_equal(got, VALUES.reshape(2, 3))
    turned = tensor_pickle(size=(3, 1), strides=(1, 1), offset=2)
    np.testing.assert_array_equal(torch_dist._tensor(archive(turned), "x"), VALUES[2:5, None])


def _overlong(data: bytes) -> bytes:
    """The directory says that the storage is longer than the file."""
    end = data.rindex(b"PK\x01\x02", 0, data.rindex(b"PK\x01\x02"))
    entry = bytearray(data)
    entry[end + 20 : end + 28] = struct.pack("<II", 10**6, 10**6)
    return bytes(entry)


TENSORS: dict[str, tuple[Callable[[], bytes], str]] = {
    "os.system as function": (lambda: archive(tensor_pickle(function="os\nsystem")), "names os.system"),
    "posix.system as function": (lambda: archive(tensor_pickle(function="posix\nsystem")), "names posix.system"),
    "eval as function": (lambda: archive(tensor_pickle(function="builtins\neval")), "names builtins.eval"),
    "a nested name": (
        lambda: archive(tensor_pickle(storage="torch\nFloatStorage.__init__.__globals__")),
        "names torch.FloatStorage.__init__",
    ),
    "another module's storage": (
        lambda: archive(tensor_pickle(storage="torch.x\nFloatStorage")),
        "names torch.x.Float",
    ),
    "a storage of unknown dtype": (lambda: archive(tensor_pickle(storage="torch\nComplexFloatStorage")), "Complex"),
    "a storage as function": (lambda: archive(tensor_pickle(function="torch\nFloatStorage")), "called as a function"),
    "a function as storage": (
        lambda: archive(tensor_pickle(storage="torch._utils\n_rebuild_tensor_v2")),
        "not read",
    ),
    "an id that is no storage": (lambda: archive(tensor_pickle(name="module")), "names no storage"),
    "an id of another member": (lambda: archive(tensor_pickle(key="../data.pkl")), "is missing"),
    "an id of too many numbers": (lambda: archive(tensor_pickle(count=7)), "expected 7 numbers"),
    "an id of 2**62 numbers": (lambda: archive(tensor_pickle(count=2**62)), "expected 4611686018427387904 numbers"),
    "an id of another dtype": (lambda: archive(tensor_pickle(storage="torch\nDoubleStorage")), "numbers of float64"),
    "a plain id": (lambda: archive(b"\x80\x02K\x01Q."), "names no storage"),
    "strides that leave the storage": (lambda: archive(tensor_pickle(strides=(4, 1))), "leaves its storage"),
    "an offset that leaves the storage": (lambda: archive(tensor_pickle(offset=1)), "leaves its storage"),
    "a negative offset": (lambda: archive(tensor_pickle(offset=-1)), "starts at -1"),
    "negative strides": (lambda: archive(tensor_pickle(strides=(-3, 1))), "other things than counts"),
    "strides of 2**62": (lambda: archive(tensor_pickle(strides=(2**62, 1))), "other things than counts"),
    "strides of nothing": (
        lambda: archive(tensor_pickle(size=(2**40,), strides=(0,))),
        "more numbers than its storage",
    ),
    "fewer strides": (lambda: archive(tensor_pickle(strides=(1,))), "not made of"),
    "no tensor": (lambda: archive(b"\x80\x02K\x01."), "got a int, expected a tensor"),
    "a list of tensors": (lambda: archive(b"\x80\x02]."), "got a list, expected a tensor"),
    "a bomb": (
        lambda: archive(tensor_pickle(), compression=zipfile.ZIP_DEFLATED, data=bytes(1 << 24)),
        "compressed or encrypted",
    ),
    "a member twice": (lambda: _twice(), "is there twice"),
    "a storage longer than the file": (lambda: _overlong(archive(tensor_pickle())), "not read"),
    "another byte order": (lambda: archive(tensor_pickle(), byteorder=b"big"), "not little-endian"),
    "no pickle": (lambda: archive(tensor_pickle()).replace(b"data.pkl", b"data.pkx"), r"no data\.pkl"),
    "no archive": (lambda: b"\x80\x02K\x01.", "it is damaged"),
    "half an archive": (lambda: archive(tensor_pickle())[:200], "it is damaged"),
    "too many opcodes": (lambda: archive(b"\x80\x02" + b"N0" * 10_000 + b"N."), "too many opcodes"),
    "too many members": (
        lambda: archive(tensor_pickle(), **{f"data/{n}": b"" for n in range(2000)}),
        "expected at most 1024",
    ),
}


def _twice() -> bytes:
    file = BytesIO(archive(tensor_pickle()))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(file, "a") as written:
        written.writestr("archive/data/0", bytes(24))
    return file.getvalue()


@pytest.mark.parametrize("kind", TENSORS)
def test_a_hostile_tensor_is_one_message(kind: str) -> None:
    make, what = TENSORS[kind]
    with pytest.raises(UsageError, match=what) as error:
        torch_dist._tensor(make(), "file: name")
    assert str(error.value).startswith("file: name: ")
    assert "fix: " in str(error.value)


# ---- writing ------------------------------------------------------------------------------------------------------
def _tensors() -> list[StoredTensor]:
    stacked = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    half = np.linspace(-3, 3, 10).astype(ml_dtypes.bfloat16)
    one = lambda array: lambda n: array if n is None else array[n]  # noqa: E731
    return [
        StoredTensor("a.stacked", stacked.shape, stacked.dtype, one(stacked), stacked=True),
        StoredTensor("b.half", half.shape, half.dtype, one(half)),
        StoredTensor("c.scalar", (), np.dtype(np.int64), lambda _: np.array(7)),
    ]


COMMON = {"args": {"num_layers": 4, "name": None}, "iteration": 12, "nested": {"list": [1, 2.5, (3, "x")]}}


def test_writing_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=re.escape("pip install jmegatron[torch]")):
        write(tmp_path / "new", 12, _tensors(), COMMON)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="writing needs torch, an optional dependency")


@pytest.mark.interop_torch
def test_what_is_written_is_read_back(torch: Any, tmp_path: Path) -> None:
    path = write(tmp_path, 12, _tensors(), COMMON, {"x._extra_state/shard_0_1": [None]})
    assert path == tmp_path / "iter_0000012"
    assert sorted(os.listdir(tmp_path)) == ["iter_0000012", torch_dist.TRACKER]
    reader = TorchDistReader(tmp_path)
    assert reader.common == COMMON
    assert list(reader.objects) == ["x._extra_state/shard_0_1"]
    assert list(reader.tensors) == ["a.stacked", "b.half", "c.scalar"]
    for tensor in _tensors():
        assert reader.tensors[tensor.name] == (tensor.shape, tensor.dtype)
        np.testing.assert_array_equal(reader.read(tensor.name), tensor.read(None))
    np.testing.assert_array_equal(reader.read("a.stacked", 2), _tensors()[0].read(2))


@pytest.mark.interop_torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_what_is_written(torch: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    path = write(tmp_path, 12, _tensors(), COMMON)
    state = {
        "a.stacked": torch.zeros(4, 3, 2),
        "b.half": torch.zeros(10, dtype=torch.bfloat16),
        "c.scalar": torch.zeros((), dtype=torch.int64),
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    for tensor in _tensors():
        assert str(state[tensor.name].dtype) == f"torch.{tensor.dtype.name}"
        np.testing.assert_array_equal(state[tensor.name].double().numpy(), tensor.read(None).astype(np.float64))
    common = torch.load(path / "common.pt", weights_only=False)
    assert vars(common["args"]) == COMMON["args"]


@pytest.mark.interop_torch
@pytest.mark.parametrize("name", ["iter_0000012", torch_dist.TRACKER])
def test_nothing_is_written_over_a_checkpoint(torch: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"{name}: is already there"):
        write(tmp_path, 12, _tensors(), COMMON)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.interop_torch
def test_a_writer_that_fails_leaves_nothing_and_one_that_was_killed_is_replaced(torch: Any, tmp_path: Path) -> None:
    def fail(_: int | None) -> np.ndarray:
        raise UsageError("no such layer")

    (tmp_path / "iter_0000012.tmp").mkdir()
    with pytest.raises(UsageError, match="no such layer"):
        write(tmp_path, 12, [*_tensors(), StoredTensor("d", (2,), np.dtype(np.float32), fail)], COMMON)
    assert os.listdir(tmp_path) == []
    (tmp_path / "iter_0000012.tmp").mkdir()
    write(tmp_path, 12, _tensors(), COMMON)
    assert TorchDistReader(tmp_path).common["iteration"] == 12
