"""Folders of safetensors files: equal to the safetensors package, hostile headers refused, resumed after a kill."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jmegatron.errors import ConfigError, UsageError
from jmegatron.interop.safetensors_folder import INDEX, SafetensorsFolder, SafetensorsWriter, parse_json

RNG = np.random.default_rng(0)
TENSORS = {f"layer.{i}.weight": RNG.standard_normal((3, i + 1)).astype(np.float32) for i in range(6)}


def header_file(header, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def one(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_all(path, tensors, dtype="F32", **options):
    with SafetensorsWriter(path, {n: a.shape for n, a in tensors.items()}, dtype, **options) as writer:
        for name, value in tensors.items():
            if not writer.is_written(name):
                writer.write(name, value)
        writer.add_file("config.json", b"{}")
        writer.commit()


# ---- reading ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_that_the_safetensors_package_wrote_are_read_exactly(tmp_path, dtype):
    rounded = {name: value.astype(dtype) for name, value in TENSORS.items()}
    save_file(rounded, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    assert folder.shapes == {name: value.shape for name, value in TENSORS.items()}
    for name, value in rounded.items():
        got = folder.read(name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, value.astype(np.float32))


LYING = {
    "header longer than the file": header_file({"a": one()}, bytes(24), length=2**40),
    "shorter than its length": b"\x01\x02",
    "no JSON": header_file(b"{nonsense", bytes(24)),
    "a list": header_file(b"[]", b""),
    "deep JSON": header_file(b"[" * 100000, b""),
    "a key twice": header_file(b'{"a": {}, "a": {}}', b""),
    "a hole": header_file({"a": one(), "b": one(offsets=(28, 52))}, bytes(52)),
    "an overlap": header_file({"a": one(), "b": one(offsets=(12, 36))}, bytes(36)),
    "twice the same bytes": header_file({"a": one(), "b": one()}, bytes(24)),
    "bytes behind": header_file({"a": one()}, bytes(25)),
    "bytes missing": header_file({"a": one()}, bytes(23)),
    "offsets of another size": header_file({"a": one(offsets=(0, 20))}, bytes(20)),
    "negative offsets": header_file({"a": one(offsets=(-24, 0))}, bytes(24)),
    "a negative shape": header_file({"a": one(shape=(-2, -3))}, bytes(24)),
    "a bool as a shape": header_file({"a": one(shape=(True, 6))}, bytes(24)),
    "an enormous shape": header_file({"a": one(shape=(2**62, 2**62))}, bytes(24)),
    "an unknown dtype": header_file({"a": one(dtype="F4")}, bytes(24)),
    "a dtype that is no text": header_file({"a": one(dtype=["F32"])}, bytes(24)),
    "no offsets": header_file({"a": {"dtype": "F32", "shape": [2, 3]}}, bytes(24)),
    "an entry that is none": header_file({"a": 3}, bytes(24)),
}


@pytest.mark.parametrize("lie", LYING)
def test_a_file_whose_header_lies_is_refused(tmp_path, lie):
    (tmp_path / "model.safetensors").write_bytes(LYING[lie])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"a": "../model-1.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "sub/x.safetensors"},
        {"a": ".hidden.safetensors"},
        {"a": "model-1.bin"},
        {"a": 3},
        {"c": "model-1.safetensors"},
        {"a": "model-2.safetensors"},
        {"a": "gone.safetensors"},
    ],
)
def test_an_index_that_does_not_fit_its_shards_or_leads_out_of_the_folder_is_refused(tmp_path, change):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, tensor in (("model-1", "a"), ("model-2", "b")):
        save_file({tensor: np.zeros(3, np.float32)}, folder / f"{name}.safetensors")
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model-1.safetensors")
    good = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": good}))
    assert set(SafetensorsFolder(folder).tensors) == {"a", "b"}
    (folder / INDEX).write_text(json.dumps({"weight_map": good | change}))
    with pytest.raises(ConfigError):
        SafetensorsFolder(folder)


def test_a_tensor_that_the_index_leaves_out_is_refused(tmp_path):
    save_file({"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}, tmp_path / "model-1.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ConfigError, match="b in model-1"):
        SafetensorsFolder(tmp_path)


def test_a_folder_without_safetensors_or_with_two_models_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="none of these files"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="pickled"):
        SafetensorsFolder(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ConfigError, match="two models"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        SafetensorsFolder(tmp_path / "nowhere")


def test_a_pipe_in_place_of_a_shard_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model-1.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ConfigError, match="plain file"):
        SafetensorsFolder(tmp_path)


def test_a_tensor_of_integers_is_refused_when_read_and_a_file_that_shrank_as_well(tmp_path):
    save_file({"ids": np.arange(3), "w": np.zeros(300, np.float32)}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    with pytest.raises(ConfigError, match="I64"):
        folder.read("ids")
    os.truncate(tmp_path / "model.safetensors", 400)
    with pytest.raises(UsageError, match="shorter"):
        folder.read("w")


@pytest.mark.parametrize("text", [b"\xff", b"3", b'{"a": NaN}', b'{"a": 1' + b"0" * 5000 + b"}"])
def test_json_that_is_no_plain_object_is_refused(text):
    with pytest.raises(ConfigError):
        parse_json(text, "x")


# ---- writing ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "as_numpy"), [("F32", np.float32), ("BF16", ml_dtypes.bfloat16), ("F16", np.float16)]
)
@pytest.mark.parametrize("max_bytes", [10**9, 100])
def test_the_safetensors_package_reads_what_is_written(tmp_path, dtype, as_numpy, max_bytes):
    path = tmp_path / "export"
    write_all(path, TENSORS, dtype, max_shard_bytes=max_bytes)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    got = {name: value for file in files for name, value in load_file(path / file).items()}
    assert got.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert got[name].dtype == as_numpy
        np.testing.assert_array_equal(got[name], value.astype(as_numpy))
    if max_bytes == 100:
        assert len(files) > 1
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
        assert json.loads((path / INDEX).read_text())["weight_map"] == {
            name: file for file in files for name in load_file(path / file)
        }
        assert all(sum(a.nbytes for a in load_file(path / file).values()) <= 100 for file in files)
    else:
        assert files == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export"]
    assert not [p for p in path.iterdir() if p.name.startswith(".") or p.suffix == ".partial"]


def test_tensors_may_come_in_any_order(tmp_path):
    backwards = dict(reversed(TENSORS.items()))
    with SafetensorsWriter(tmp_path / "x", {n: a.shape for n, a in TENSORS.items()}, "F32", max_shard_bytes=100) as w:
        for name, value in backwards.items():
            w.write(name, value)
        w.commit()
    folder = SafetensorsFolder(tmp_path / "x")
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(folder.read(name), value)


def test_a_killed_writers_complete_shards_stay_and_others_are_written_again(tmp_path):
    shapes, written = {n: a.shape for n, a in TENSORS.items()}, []
    with SafetensorsWriter(tmp_path / "x", shapes, "F32", source="s", max_shard_bytes=100) as writer:
        for name, value in list(TENSORS.items())[:4]:
            writer.write(name, value)
    assert not (tmp_path / "x").exists()
    complete = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "x.tmp").glob("*.safetensors")}
    assert complete
    with SafetensorsWriter(tmp_path / "x", shapes, "F32", source="s", max_shard_bytes=100) as writer:
        for name, value in TENSORS.items():
            if not writer.is_written(name):
                writer.write(name, value)
                written.append(name)
        writer.commit()
    assert {n: (tmp_path / "x" / n).stat().st_mtime_ns for n in complete} == complete
    assert 0 < len(written) < len(TENSORS)
    folder = SafetensorsFolder(tmp_path / "x")
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(folder.read(name), value)


def test_what_a_conversion_of_another_source_has_left_is_begun_anew(tmp_path):
    shapes = {n: a.shape for n, a in TENSORS.items()}
    with SafetensorsWriter(tmp_path / "x", shapes, "F32", source="one") as writer:
        for name, value in TENSORS.items():
            writer.write(name, value)
    with SafetensorsWriter(tmp_path / "x", shapes, "F32", source="two") as writer:
        assert not any(writer.is_written(name) for name in TENSORS)


def test_folders_that_are_there_are_not_overwritten(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("")
    (tmp_path / "y.tmp").mkdir()
    (tmp_path / "y.tmp" / "mine").write_text("")
    for name in ("x", "y"):
        with pytest.raises(UsageError, match="already there"):
            write_all(tmp_path / name, TENSORS)
    assert (tmp_path / "x" / "mine").exists()
    assert (tmp_path / "y.tmp" / "mine").exists()


def test_a_value_too_large_for_the_dtype_stops_the_export_and_infinity_does_not(tmp_path):
    for name, value, fine in (("a", np.inf, True), ("b", 65504.0, True), ("c", 1e5, False)):
        with SafetensorsWriter(tmp_path / name, {"w": (1,)}, "F16") as writer:
            if fine:
                writer.write("w", np.array([value], np.float32))
                continue
            with pytest.raises(ConfigError, match="float16"):
                writer.write("w", np.array([value], np.float32))


def test_wrong_shapes_second_writes_and_missing_tensors_are_our_own_errors(tmp_path):
    with SafetensorsWriter(tmp_path / "x", {"a": (2,), "b": (2,)}, "F32") as writer:
        with pytest.raises(ValueError, match="expected"):
            writer.write("a", np.zeros(3, np.float32))
        writer.write("a", np.zeros(2, np.float32))
        with pytest.raises(ValueError, match="already"):
            writer.write("a", np.zeros(2, np.float32))
        with pytest.raises(ValueError, match="b"):
            writer.commit()
    assert not (tmp_path / "x").exists()
