"""Hostile configs, tokenizers and data files: nothing in them is run, resolved or believed; one message, little memory.

Each bait makes the folder `marker` if something in a file is ever executed. That it has not been made, and that the
memory of the process has not grown by MOST_MEMORY, is checked after every test. Checkpoints have tests of their own.
"""

import ast
import base64
import contextlib
import gzip
import importlib.util
import io
import json
import logging
import os
import pickle
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from training_runs import MODEL, ROOT, write_corpus

from jmegatron.config import config_from_yaml, load_config, parse_or_exit
from jmegatron.data import preprocess_encode, preprocess_input, sft
from jmegatron.data.blend import BlendIndex, read_data_args, read_split_data_args
from jmegatron.data.blended_dataset import BlendedDataset
from jmegatron.data.gpt_dataset import GPTDataset
from jmegatron.data.indexed_dataset import HEADER, MAGIC, IndexedDataset
from jmegatron.data.sft import ChatTemplate, ConversationFile, parse_conversation
from jmegatron.data.tokenizers import (
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    build_tokenizer,
)
from jmegatron.data.tokenizers.training import save_tokenizer, train_bpe
from jmegatron.errors import ConfigError, DataFileError

sys.path.insert(0, str(ROOT))
import train as program

sys.path.pop(0)

MOST_MEMORY = 300 << 20
"""Bytes; a zstandard archive alone unpacks to 130 MB from 4 KB."""
SECRET = "hunter2"


def _peak_memory() -> int:
    """Returns the most memory that the process has held, in bytes."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.fixture(autouse=True)
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The folder that no file may make."""
    monkeypatch.setenv("HOSTILE_SECRET", SECRET)
    with contextlib.suppress(OSError):  # where the peak cannot be reset, only what goes beyond an older one counts
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_memory()
    path = tmp_path / "marker"
    yield path
    assert not path.exists(), "something in a file was executed"
    assert _peak_memory() - before < MOST_MEMORY


class Bait:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def test_the_baits_are_live(tmp_path: Path) -> None:
    """Else their absence from the tests below would say nothing."""
    for number, bite in enumerate(
        [
            lambda path: pickle.loads(pickle.dumps(Bait(path))),
            lambda path: yaml.unsafe_load(f"!!python/object/apply:os.mkdir ['{path}']"),
            lambda path: np.load(io.BytesIO(_npy_of_objects(path)), allow_pickle=True),
            lambda path: eval(_code(path)),
        ]
    ):
        path = tmp_path / f"bait{number}"
        bite(path)
        assert path.is_dir()


def _code(marker: Path) -> str:
    return f"__import__('os').mkdir('{marker}')"


def _npy_of_objects(marker: Path) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Bait(marker)], dtype=object), allow_pickle=True)
    return file.getvalue()


# ---------------------------------------------------------------------------------------------------------- source

# What runs a program, or makes objects of any class, out of bytes.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jinja2", "runpy"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
YAML_LOADERS = {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all", "Loader"}
YAML_LOADERS |= {"FullLoader", "UnsafeLoader", "CLoader", "CFullLoader", "CUnsafeLoader"}


def _offences(source: str) -> list[str]:
    """Returns what a program does that may run what a file holds."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            banned = YAML_LOADERS if module == "yaml" else {"load"} if module in ("numpy", "torch") else set()
            found += [module] if module.split(".")[0] in MODULES else []
            found += [f"{module}.{alias.name}" for alias in node.names if alias.name in banned]
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "yaml" and node.attr in YAML_LOADERS:
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call):
            found += _call_offences(node)
    return found


def _call_offences(node: ast.Call) -> list[str]:
    name = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    wrong = [
        name in BUILTINS,
        name == "os.system",
        given.get("allow_pickle", "False") != "False",
        given.get("shell", "False") != "False",
        given.get("trust_remote_code", "False") != "False",
        name in ("np.load", "numpy.load") and "allow_pickle" not in given,
        name == "torch.load" and given.get("weights_only") != "True",
    ]
    return [ast.unparse(node)] if any(wrong) else []


def test_no_source_file_can_run_what_a_file_holds() -> None:
    files = [
        ROOT / "train.py",
        *(p for name in ("jmegatron", "scripts", "examples") for p in (ROOT / name).rglob("*.py")),
    ]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): offences for path in files if (offences := _offences(path.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "exec(text)",
        "exec(compile(text, 'x', 'exec'))",
        "import pickle",
        "from pickle import loads",
        "import marshal, os",
        "import shelve",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "from numpy import load",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(text)",
        "from yaml import unsafe_load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "jinja2 = __import__('jinja2')",
    ],
)
def test_the_search_of_the_source_finds(line: str) -> None:
    assert _offences(f"def f(text, path):\n    {line}\n")


def test_the_search_of_the_source_passes_what_is_harmless() -> None:
    lines = [
        "np.load(path, allow_pickle=False)",
        "torch.load(path, weights_only=True)",
        "step.compile()",
        "re.compile(x)",
    ]
    assert _offences("\n".join([*lines, "yaml.parse(text, Loader=yaml.SafeLoader)", "json.load(file)"])) == []


# ---------------------------------------------------------------------------------------------------------- config

PLAIN = """
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32, max_position_embeddings: 32}
optimizer: {lr: 1e-3}
training: {micro_batch_size: 2, train_iters: 5}
data: {mock_data: true}
"""
_LAUGHS = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}' if n else 'ha'] * 10)}]\n" for n in range(20))

YAML = {
    "a call": ("checkpoint: {save: !!python/object/apply:os.mkdir ['MARKER']}", "tag"),
    "a call with new": ("checkpoint: {save: !!python/object/new:os.mkdir ['MARKER']}", "tag"),
    "a call in a key": ("? !!python/object/apply:os.mkdir ['MARKER']\n: 1", "tag"),
    "a call in a list": ("data: {data_path: [a, !!python/object/apply:os.mkdir ['MARKER']]}", "tag"),
    "a call under a handle": ("%TAG !p! tag:yaml.org,2002:python/\n---\na: !p!object/apply:os.mkdir ['MARKER']", "tag"),
    "a module": ("checkpoint: {save: !!python/module:this }", "tag"),
    "a name": ("checkpoint: {save: !!python/name:os.system }", "tag"),
    "a path, which OmegaConf would make": ("checkpoint: {save: !!python/object/apply:pathlib.Path [a, b]}", "tag"),
    "bytes, which OmegaConf would make": ("checkpoint: {save: !!binary aGk=}", "tag"),
    "a harmless tag": ("checkpoint: {save: !!str 5}", "tag"),
    "an unknown tag": ("checkpoint: {save: !other x}", "tag"),
    "an empty tag": ("checkpoint: {save: ! x}", "tag"),
    "an alias": ("checkpoint: {save: &a x, load: *a}", "anchor"),
    "a merge": ("checkpoint: &a {save: x}\nlogging: {<<: *a}", "anchor"),
    "ten to the twenty": (_LAUGHS, "anchor"),
    "an alias of itself": ("checkpoint: &a {save: *a}", "anchor"),
    "an alias of nothing": ("checkpoint: {save: *a}", "anchor"),
    "deep lists": ("data: {data_path: " + "[" * 300 + "]" * 300 + "}", "inside one another"),
    "deep mappings": ("data: {data_path: " + "{a: " * 900 + "1" + "}" * 900 + "}", "inside one another"),
    "very deep lists": ("data: " + "[" * 100_000, "inside one another"),
    "a key twice": ("checkpoint: {save: x, save: y}", "duplicate"),
    "a section twice": ("data: {demo_data: true}", "duplicate"),
    "a number of 5000 digits": ("logging: {log_interval: " + "9" * 5000 + "}", "4300 digits"),
    "two documents": ("checkpoint: {}\n---\ncheckpoint: {}", "another document"),
    "a list as a key": ("? [a]\n: 1", "unhashable"),
    "a zero byte": ('checkpoint: {save: "a\\0b"}', "zero byte"),
    "a zero byte in a list": ('checkpoint: {save: x}\nlogging: {metrics_file: "\\0"}', "zero byte"),
    "a variable of the environment": ("checkpoint: {save: '${oc.env:HOSTILE_SECRET}'}", "${oc.env:HOSTILE_SECRET}"),
    "one inside a text": ("checkpoint: {save: 'x/${oc.env:HOSTILE_SECRET}/y'}", "${oc.env:HOSTILE_SECRET}"),
    "one in a list": ("checkpoint: {save: ['${oc.env:HOSTILE_SECRET}']}", "${oc.env:HOSTILE_SECRET}"),
    "one in a mapping": ("checkpoint: {save: {a: '${oc.env:HOSTILE_SECRET}'}}", "${oc.env:HOSTILE_SECRET}"),
    "one with a backslash": ("checkpoint: {save: '\\${oc.env:HOSTILE_SECRET}'}", "${oc.env:HOSTILE_SECRET}"),
    "one as a section": ("checkpoint: ${oc.env:HOSTILE_SECRET}", "${oc.env:HOSTILE_SECRET}"),
    "one as a key": ("checkpoint: {'${oc.env:HOSTILE_SECRET}': 1}", "${oc.env:HOSTILE_SECRET}"),
    "one as a section's name": ("${oc.env:HOSTILE_SECRET}: {save: x}", "${oc.env:HOSTILE_SECRET}"),
    "one in another": ("logging: {log_interval: '${oc.decode:${oc.env:HOSTILE_SECRET}}'}", "${oc.decode:${oc.env:"),
    "another option": ("checkpoint: {save: '${optimizer.lr}'}", "${optimizer.lr}"),
}  # fmt: skip


def test_the_plain_config_under_the_hostile_ones_is_accepted() -> None:
    assert config_from_yaml(PLAIN).model.num_layers == 2


@pytest.mark.parametrize("kind", YAML)
def test_a_hostile_config_gives_one_message_and_status_2(kind: str, tmp_path: Path, marker: Path, capsys: Any) -> None:
    text, word = YAML[kind]
    text = text.replace("MARKER", str(marker))
    path = tmp_path / "hostile.yaml"
    path.write_text(text if text.startswith("%") else PLAIN + text + "\n")
    with pytest.raises(SystemExit) as leave:
        parse_or_exit(["--config", str(path), "--print-config"])
    out, err = capsys.readouterr()
    assert leave.value.code == 2
    assert out == ""
    assert err.startswith("train.py: error: ")
    assert str(path) in err
    assert word in err
    assert "Traceback" not in err
    assert SECRET not in err
    # The text of a config that a checkpoint holds takes the same way.
    with pytest.raises(ConfigError, match=re.escape(word)):
        config_from_yaml(path.read_text(), "the checkpoint's config")


def test_a_pickle_as_a_config_is_refused(tmp_path: Path, marker: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(pickle.dumps(Bait(marker)))
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_config(["--config", str(tmp_path / "x.yaml")])


def test_the_environment_is_not_looked_up_on_the_command_line(capsys: Any) -> None:
    with pytest.raises(SystemExit) as leave:
        parse_or_exit([*MODEL, "--train-iters", "1", "--mock-data", "--save", "${oc.env:HOSTILE_SECRET}"])
    assert leave.value.code == 2
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["a call", "ten to the twenty", "deep lists", "a variable of the environment"])
def test_the_program_itself_refuses_a_hostile_config_with_status_2(kind: str, tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text(PLAIN + YAML[kind][0].replace("MARKER", str(marker)))
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--config", str(path)],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("train.py: error: ")
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------------ tokenizers

WORDS = {"a": 0, "b": 1, "[UNK]": 2, "</s>": 3}


def _tokenizer_json(**parts: Any) -> str:
    """Returns a tokenizer.json of four words with some parts replaced."""
    empty = dict.fromkeys(["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"])
    model = {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", **empty, "added_tokens": [], "model": model, **parts})


def _tokenizers(path: Path) -> dict[str, Any]:
    """Returns a function for each reader of tokenizer files that reads `path`."""
    return {
        "HuggingFaceTokenizer": lambda: HuggingFaceTokenizer(path),
        "SentencePieceTokenizer": lambda: SentencePieceTokenizer(path),
        "TikTokenizer": lambda: TikTokenizer(path, 300, num_special_tokens=10),
        "GPT2BPETokenizer": lambda: GPT2BPETokenizer(path, path),
    }


@pytest.mark.parametrize("reader", _tokenizers(Path()))
@pytest.mark.parametrize("content", ["pickle", "text pickle", "python", "objects", "deep", "deep objects", "binary"])
def test_a_foreign_tokenizer_file_is_refused(reader: str, content: str, tmp_path: Path, marker: Path) -> None:
    if reader in ("SentencePieceTokenizer", "TikTokenizer"):
        pytest.importorskip({"SentencePieceTokenizer": "sentencepiece", "TikTokenizer": "tiktoken"}[reader])
    path = tmp_path / "vocabulary"
    path.write_bytes(
        {
            "pickle": pickle.dumps(Bait(marker)),
            "text pickle": pickle.dumps(Bait(marker), protocol=0),
            "python": _code(marker).encode(),
            "objects": _npy_of_objects(marker),
            "deep": b"[" * 100_000,
            "deep objects": b'{"a":' * 5000 + b"1" + b"}" * 5000,
            "binary": bytes(range(256)) * 40,
        }[content]
    )
    with pytest.raises(DataFileError, match=re.escape(str(path))) as error:
        _tokenizers(path)[reader]()
    assert "fix:" in str(error.value)


@pytest.fixture
def foreign_code(tmp_path: Path, marker: Path) -> Path:
    """A tokenizer's folder as the Hugging Face hub has them, with programs wherever transformers would run one."""
    folder = tmp_path / "foreign"
    save_tokenizer(train_bpe(["a b c"], 259, ["<|im_start|>", "<|im_end|>"]), folder)
    template = "{{ cycler.__init__.__globals__.os.mkdir('" + str(marker) + "') }}{{ messages }}"
    settings = {
        "tokenizer_class": "HostileTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_hostile.HostileTokenizer", None]},
        "trust_remote_code": True,
        "chat_template": template,
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "__reduce__": _code(marker)},
        "vocab_file": "../../../../etc/passwd",
        "tokenizer_file": "vocab.pkl",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "tokenization_hostile.Config"}}))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    for name in ("tokenization_hostile.py", "__init__.py", "sitecustomize.py", "tokenizers.py"):
        (folder / name).write_text(_code(marker) + "\n")
    for name in ("vocab.pkl", "added_tokens.json", "tokenizer.model"):
        (folder / name).write_bytes(pickle.dumps(Bait(marker)))
    return folder


def test_a_program_beside_a_tokenizer_is_never_imported(foreign_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(foreign_code)
    before = set(sys.modules)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", foreign_code)
    assert tokenizer.eod == tokenizer.special_id("<|im_end|>") == 2  # the one thing read from the files beside it
    assert tokenizer.detokenize(tokenizer.tokenize("a {{ 7 * 7 }}")) == "a {{ 7 * 7 }}"
    assert not {name for name in set(sys.modules) - before if "hostile" in name or name.startswith("jinja2")}


def test_a_chat_template_of_a_tokenizer_is_never_rendered(foreign_code: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    save_tokenizer((foreign_code / "tokenizer.json").read_text(), plain)
    messages = [
        {"role": "user", "content": "{{ 7 * 7 }}{% for m in messages %}"},
        {"role": "assistant", "content": "b"},
    ]
    hostile, expected = (
        ChatTemplate(HuggingFaceTokenizer(folder)).encode([messages])[0].tokens for folder in (foreign_code, plain)
    )
    assert hostile.tolist() == expected.tolist()
    # 0 is the end of text, 1 and 2 the marks of ChatML; bytes of the text come back as they were.
    text = HuggingFaceTokenizer(plain).detokenize(hostile)
    assert text == "user\n{{ 7 * 7 }}{% for m in messages %}\nassistant\nb\n"


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


HUGGING_FACE = {
    "an id of 2**32 - 1": {"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}},
    "an id of 2**63": {"model": {"type": "WordLevel", "vocab": {"a": 2**63}, "unk_token": "a"}},
    "a negative id": {"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}},
    "a broken pattern": {"pre_tokenizer": _split("(")},
    "a table that leaves its bytes": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAP////8="}},
    "a class of Python": {"pre_tokenizer": {"type": "Custom", "class": "os.system"}},
    "an unknown id out of range": {"model": {"type": "Unigram", "unk_id": 2**40, "vocab": [["a", 0.0]]}},
}


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_a_tokenizer_json_that_lies_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(_tokenizer_json(**HUGGING_FACE[kind]))
    with pytest.raises(DataFileError, match=r"tokenizer\.json: got"):
        HuggingFaceTokenizer(tmp_path)


def test_padding_and_truncation_that_a_tokenizer_json_asks_for_are_not_done(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    truncation = {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(_tokenizer_json(padding=padding, truncation=truncation))
    assert HuggingFaceTokenizer(tmp_path).tokenize("a").tolist() == [0]


def test_a_pattern_that_takes_for_ever_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(_tokenizer_json(pre_tokenizer=_split("(a+)+$")))
    with pytest.raises(DataFileError, match="--tokenizer-model"):
        HuggingFaceTokenizer(tmp_path).tokenize("a" * 40 + "b")


def _field(number: int, content: bytes) -> bytes:
    """Returns a field of a protocol buffer with its length in front."""
    size, digits = len(content), bytearray()
    while size > 127:
        digits.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *digits, size]) + content


def _piece(text: bytes, kind: int) -> bytes:
    return _field(1, _field(1, text) + bytes([2 << 3 | 5, 0, 0, 0, 0, 3 << 3, kind]))


_PIECES = _piece(b"<unk>", 2) + _piece(b"<s>", 3) + _piece(b"</s>", 3)
SENTENCE_PIECE = {
    "a piece that overflowed the stack": _PIECES + _piece(b"a" * 500_000, 1),
    "a length beyond the file": b"\x0a\xff\xff\xff\xff\x07x",
    "a length of 2**63": b"\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01x",
    "groups in groups": b"\x0b" * 100_000,
    "a table that leaves its bytes": _PIECES + _piece(b"a", 1) + _field(3, _field(2, b"\xff" * 64)),
    "the same piece twice": _PIECES + _piece(b"a", 1) * 2,
    "a piece without text": _PIECES + _piece(b"", 1),
}


@pytest.mark.parametrize("kind", SENTENCE_PIECE)
def test_a_sentence_piece_model_that_lies_is_refused(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    (tmp_path / "x.model").write_bytes(_PIECES + _piece(b"a", 1))
    assert SentencePieceTokenizer(tmp_path / "x.model").vocab_size == 4  # the sound part is accepted
    (tmp_path / "x.model").write_bytes(SENTENCE_PIECE[kind])
    with pytest.raises(DataFileError, match=r"x\.model: got bytes the sentencepiece library refuses"):
        SentencePieceTokenizer(tmp_path / "x.model")


@pytest.mark.parametrize("rank", [2**63, -1, 1e300, "0", None, [0], {"__class__": "os.system"}])
def test_a_tiktoken_vocabulary_that_lies_is_refused(rank: Any, tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    entries = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]
    entries += [{"rank": 256 + n, "token_bytes": base64.b64encode(bytes([97, n])).decode()} for n in range(34)]
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(entries))
    assert TikTokenizer(path, 300, num_special_tokens=10).vocab_size == 300  # without the lie it is accepted
    entries[280]["rank"] = rank
    path.write_text(json.dumps(entries))
    with pytest.raises(DataFileError, match=r"vocabulary\.json: got .* as entry 280"):
        TikTokenizer(path, 300, num_special_tokens=10)


# ---------------------------------------------------------------------------------------------------------- corpora


def _index(num_sequences: int, num_marks: int, code: int = 8) -> bytes:
    return HEADER.pack(MAGIC, 1, code, num_sequences, num_marks)


@pytest.mark.parametrize("counts", [(2**60, 2), (1, 2**60), (2**60, 2**60), (2**64 - 1, 2**64 - 1), (2**62, 2**62 + 1)])
def test_an_index_that_counts_more_than_it_holds_is_refused(counts: tuple[int, int], tmp_path: Path) -> None:
    """(2**62, 2**62 + 1) would take 12 * 2**62 + 8 * 2**62 + 8 = 8 bytes in 64 bits."""
    (tmp_path / "c.idx").write_bytes(_index(*counts) + bytes(12 + 16))
    (tmp_path / "c.bin").write_bytes(bytes(2))
    with pytest.raises(DataFileError, match=rf"c\.idx is damaged or cut short.* for the {counts[0]} sequences"):
        IndexedDataset(tmp_path / "c")


def test_an_index_of_holes_larger_than_memory_is_refused_at_once(tmp_path: Path) -> None:
    num_sequences = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8 + 1
    (tmp_path / "c.idx").write_bytes(_index(num_sequences, 1))
    try:
        os.truncate(tmp_path / "c.idx", HEADER.size + 12 * num_sequences + 8)
    except OSError:
        pytest.skip("no files with holes of this size here")
    (tmp_path / "c.bin").write_bytes(b"")
    with pytest.raises(DataFileError, match=r"c\.idx: got \d+ sequences, expected at most"):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("ending", ["idx", "bin"])
@pytest.mark.parametrize("kind", ["pickle", "objects", "link to nothing", "link to itself", "folder"])
def test_a_foreign_file_in_place_of_a_corpus_is_refused(ending: str, kind: str, tmp_path: Path, marker: Path) -> None:
    path = Path(write_corpus(tmp_path / "c") + f".{ending}")
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind.startswith("link"):
        path.symlink_to(path if kind == "link to itself" else tmp_path / "nothing")
    else:
        path.write_bytes(pickle.dumps(Bait(marker)) if kind == "pickle" else _npy_of_objects(marker))
    with pytest.raises(DataFileError, match=re.escape(str(path))):
        IndexedDataset(tmp_path / "c")


# ------------------------------------------------------------------------------------------------------ index cache


def _header(descr: str, shape: str, order: str = "False") -> bytes:
    return _npy(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}")


def _npy(header: str, content: bytes = b"") -> bytes:
    """Returns a .npy file with a header that numpy would not write."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + content


def _archive(marker: Path) -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.array([Bait(marker)], dtype=object), allow_pickle=True)
    return file.getvalue()


ARRAYS = {
    "a pickle": lambda marker: pickle.dumps(Bait(marker)),
    "an array of objects": _npy_of_objects,
    "an archive of objects": _archive,
    "half an archive": lambda marker: b"PK\x03\x04 and no more",
    "a header that calls": lambda marker: _npy(_code(marker)),
    "a type that calls": lambda marker: _header(repr(_code(marker)), "(3,)"),
    "a shape that calls": lambda marker: _header("'<i8'", f"({_code(marker)},)"),
    "a field of objects": lambda marker: _header("[('a', 'O')]", "(3,)") + bytes(24),
    "2**60 numbers": lambda marker: _header("'<i8'", f"({2**60},)"),
    "2**70 numbers": lambda marker: _header("'<i8'", f"({2**70},)"),
    "a size that overflows": lambda marker: _header("'<i8'", f"({2**40}, {2**40})"),
    "a negative size": lambda marker: _header("'<i8'", "(-5,)"),
    "a size that is no number": lambda marker: _header("'<i8'", "('a',)"),
    "a size that is true": lambda marker: _header("'<i8'", "(True,)"),
    "an item of 100 GB": lambda marker: _header("'|S99999999999'", "(1,)"),
    "columns first": lambda marker: _header("'<i8'", "(2, 2)", "True") + bytes(32),
    "a deep header": lambda marker: _npy("(" * 3000),
    "a deeper header": lambda marker: _npy("-" * 9000 + "1"),
    "an open text": lambda marker: _npy("{'descr': '''"),
    "a header of 4 GB": lambda marker: b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
    "a version that comes one day": lambda marker: b"\x93NUMPY\x09\x00\x10\x00" + b" " * 16,
    "nothing": lambda marker: b"",
}


@pytest.fixture
def cached(tmp_path: Path) -> Any:
    """(function that builds a dataset with a cache, its samples as they are without one, the cache's folder)."""
    corpus = IndexedDataset(write_corpus(tmp_path / "c", documents=10))
    cache = tmp_path / "cache"

    def build(cache_dir: Path | None = cache) -> GPTDataset:
        return GPTDataset(corpus, (0, len(corpus)), 20, 16, 1234, cache_dir=cache_dir)

    plain = build(None)
    return build, plain.texts(np.arange(len(plain))), cache


def _is_whole(built: Any, expected: np.ndarray) -> bool:
    return np.array_equal(built.texts(np.arange(len(built))), expected)


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_hostile_array_in_the_cache_is_never_read_and_built_again(
    kind: str, cached: Any, marker: Path, caplog: Any
) -> None:
    build, expected, cache = cached
    build()
    for path in cache.glob("*_index.npy"):
        path.write_bytes(ARRAYS[kind](marker))
    with caplog.at_level(logging.WARNING):
        assert _is_whole(build(), expected)
    assert caplog.text.count("building the index again") == 1
    assert str(cache) in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert _is_whole(build(), expected)
    assert caplog.text == ""


@pytest.mark.parametrize("content", [b"[" * 100_000, b"9" * 5000, b"[]", b"null", b"\xff\xfe", b"\x80\x04N."])
def test_a_hostile_description_in_the_cache_is_built_again(content: bytes, cached: Any) -> None:
    build, expected, cache = cached
    build()
    (path,) = cache.glob("*.json")
    path.write_bytes(content)
    assert _is_whole(build(), expected)
    assert json.loads(path.read_bytes()).keys() == {"document_index", "sample_index", "shuffle_index"}


def _forge(cache: Path, change: Any) -> None:
    """Changes the arrays of a cache, with their checksums."""
    (description,) = cache.glob("*.json")
    names = json.loads(description.read_text())
    arrays = change({name: np.load(description.with_suffix(f".{name}.npy")) for name in names})
    for name, values in arrays.items():
        np.save(description.with_suffix(f".{name}.npy"), values)
        crc = zlib.crc32(np.ascontiguousarray(values))
        names[name] = {"shape": list(values.shape), "dtype": values.dtype.str, "crc32": crc}
    description.write_text(json.dumps(names))


FORGERIES = {
    "documents beyond the corpus": lambda a: a | {"document_index": a["document_index"] + 2**30},
    "documents before the corpus": lambda a: a | {"document_index": a["document_index"] - 1},
    "documents as fractions": lambda a: a | {"document_index": a["document_index"].astype(np.float64)},
    "documents in a table": lambda a: a | {"document_index": a["document_index"][None]},
    "a single number": lambda a: a | {"document_index": np.array(3)},
    "no documents": lambda a: a | {"document_index": a["document_index"][:0]},
    "positions beyond the documents": lambda a: a | {"sample_index": a["sample_index"] + [2**40, 0]},
    "offsets beyond any sequence": lambda a: a | {"sample_index": a["sample_index"] + [0, 2**62]},
    "negative offsets": lambda a: a | {"sample_index": a["sample_index"] - [0, 10**6]},
    "fewer samples": lambda a: a | {"sample_index": a["sample_index"][:-3]},
    "unsigned samples": lambda a: a | {"sample_index": a["sample_index"].astype(np.uint64)},
    "rows beyond the samples": lambda a: a | {"shuffle_index": a["shuffle_index"] + 7},
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_cache_that_leaves_the_corpus_is_built_again(kind: str, cached: Any, caplog: Any) -> None:
    """The checksums fit: they are a guard against damage, not against a person."""
    build, expected, cache = cached
    build()
    _forge(cache, FORGERIES[kind])
    with caplog.at_level(logging.WARNING):
        assert _is_whole(build(), expected)
    assert "leaves the corpus: building the index again" in caplog.text


SHAPELESS = {
    "samples that end before they begin": lambda a: a | {"sample_index": a["sample_index"][::-1].copy()},
    "samples of the whole corpus": lambda a: a | {"sample_index": a["sample_index"] * [0, 1] + _ends(a)},
    "samples of nothing": lambda a: a | {"sample_index": a["sample_index"] * 0},
    "offsets behind a sequence": lambda a: a | {"sample_index": a["sample_index"] * [1, 0] + [0, 50]},
}


def _ends(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Positions that jump from the first document to the last and back."""
    return np.arange(len(arrays["sample_index"]))[:, None] % 2 * [len(arrays["document_index"]) - 1, 0]


@pytest.mark.parametrize("kind", SHAPELESS)
def test_a_forged_cache_whose_samples_have_another_length_is_refused_when_read(kind: str, cached: Any) -> None:
    build, _, cache = cached
    build()
    _forge(cache, SHAPELESS[kind])
    dataset = build()
    with pytest.raises(DataFileError, match="--data-cache-path: a cached index does not fit"):
        dataset.texts(np.arange(len(dataset)))


BLENDS = {
    "a corpus that is not there": lambda a: a | {"dataset_index": a["dataset_index"] + 7},
    "a negative corpus": lambda a: a | {"dataset_index": a["dataset_index"] - 1},
    "corpus 2**60": lambda a: a | {"dataset_index": a["dataset_index"].astype(np.int64) + 2**60},
    "samples that are not there": lambda a: a | {"dataset_sample_index": a["dataset_sample_index"] + 2**40},
    "negative samples": lambda a: a | {"dataset_sample_index": a["dataset_sample_index"] - 5},
    "fewer samples": lambda a: a | {"dataset_sample_index": a["dataset_sample_index"][:-1]},
}


@pytest.mark.parametrize("kind", BLENDS)
def test_a_forged_cache_of_a_blend_is_built_again(kind: str, tmp_path: Path) -> None:
    corpora = [IndexedDataset(write_corpus(tmp_path / f"c{n}", documents=10, seed=n)) for n in range(2)]
    parts = [GPTDataset(corpus, (0, 10), 20, 16, 1234) for corpus in corpora]

    def build(cache: Path | None) -> BlendIndex:
        return BlendedDataset(parts, [0.3, 0.7], 20, cache_dir=cache).index

    expected = build(None)
    build(tmp_path / "cache")
    _forge(tmp_path / "cache", BLENDS[kind])
    assert all(np.array_equal(*pair) for pair in zip(build(tmp_path / "cache"), expected, strict=True))


def test_links_in_the_cache_are_not_written_through(cached: Any, tmp_path: Path, marker: Path) -> None:
    build, expected, cache = cached
    build()
    other = tmp_path / "other"
    other.write_bytes(pickle.dumps(Bait(marker)))
    before = other.read_bytes()
    for path in (*cache.glob("*.json"), *cache.glob("*.npy")):
        path.unlink()
        path.symlink_to(other)
    (cache / ".lock").unlink()
    (cache / ".lock").symlink_to(tmp_path / "made through a link")
    assert _is_whole(build(), expected)
    assert other.read_bytes() == before
    assert not [path for path in cache.iterdir() if path.is_symlink() and path.name != ".lock"]
    assert not (tmp_path / "made through a link").exists()


# ------------------------------------------------------------------------------------------------- lists of corpora


SPLIT_FILES = {
    "pickle": lambda marker: pickle.dumps(Bait(marker)),
    "text pickle": lambda marker: pickle.dumps(Bait(marker), protocol=0),
    "python": lambda marker: _code(marker).encode(),
    "a dict of Python": lambda marker: b"{'train': ['a'], 'valid': None, 'test': None}",
    "deep": lambda marker: b"[" * 100_000,
    "deep words": lambda marker: b'{"train": ' + b"[" * 20_000 + b"]" * 20_000 + b', "valid": null, "test": null}',
    "a number of 5000 digits": lambda marker: b'{"train": [' + b"9" * 5000 + b'], "valid": null, "test": null}',
    "an object for a list": lambda marker: b'{"train": {"__class__": "os.system"}, "valid": null, "test": null}',
}


@pytest.mark.parametrize("kind", SPLIT_FILES)
def test_a_hostile_list_of_corpora_by_split_is_refused(kind: str, tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "splits.json"
    path.write_bytes(SPLIT_FILES[kind](marker))
    with pytest.raises(DataFileError, match=rf"--per-split-data-args-path {re.escape(str(path))}"):
        read_split_data_args(str(path))


def test_a_list_of_corpora_is_words_and_nothing_else(tmp_path: Path, marker: Path) -> None:
    words = f"$(mkdir {marker}) `mkdir {marker}` $HOSTILE_SECRET ${{oc.env:HOSTILE_SECRET}} ~ *"
    (tmp_path / "list").write_text(words)
    assert read_data_args(str(tmp_path / "list")) == tuple(words.split())
    (tmp_path / "list").write_bytes(pickle.dumps(Bait(marker)))
    with pytest.raises(DataFileError, match=r"--data-args-path .*list"):
        read_data_args(str(tmp_path / "list"))


@pytest.mark.parametrize(
    "name", ["a\0b", "a\ud800b", "$HOSTILE_SECRET", "~", "/proc/self/mem", "a" * 5000, "/dev/zero"]
)
def test_a_corpus_of_an_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(DataFileError) as error:
        IndexedDataset(name)
    assert name in str(error.value)


# ------------------------------------------------------------------------------------------------------- text files

LINES = {
    "pickle": lambda marker: pickle.dumps(Bait(marker)),
    "text pickle": lambda marker: pickle.dumps(Bait(marker), protocol=0),
    "python": lambda marker: _code(marker).encode(),
    "deep": lambda marker: b'{"text": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "deep and open": lambda marker: b'{"messages": ' + b"[" * 200_000,
    "a class": lambda marker: b'{"text": {"py/object": "os.system"}, "messages": [{"py/reduce": ["os.mkdir", "x"]}]}',
    "a role that is a list": lambda marker: b'{"messages": [{"role": [[]], "content": "x"}]}',
    "a number of 5000 digits": lambda marker: b'{"text": ' + b"9" * 5000 + b"}",
}


@pytest.fixture
def preprocess() -> Any:
    """The program that turns text into a corpus."""
    spec = importlib.util.spec_from_file_location("preprocess_data", ROOT / "scripts" / "preprocess_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *arguments: module.main(list(map(str, arguments)))


@pytest.mark.parametrize("kind", LINES)
def test_a_hostile_line_is_refused_with_status_2(
    kind: str, preprocess: Any, tmp_path: Path, marker: Path, capsys: Any
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(LINES[kind](marker))
    assert preprocess("--input", path, "--output-prefix", tmp_path / "out", "--workers", 1) == 2
    err = capsys.readouterr().err
    assert "error: " in err
    assert str(path) in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(DataFileError, match=rf"--sft {re.escape(str(path))}, line 1: "):
        ConversationFile(path, build_tokenizer("ByteTokenizer"))


@pytest.mark.parametrize("depth", [*range(960, 1000, 4), *range(9950, 10010, 10)])
def test_nesting_near_the_limit_of_recursion_is_a_bad_line(depth: int) -> None:
    """What the parser still takes must not break the message that quotes it."""
    deep = "[" * depth + "]" * depth
    for message in (deep, f'{{"role": {deep}, "content": "x"}}', f'{{"role": "user", "content": {deep}}}'):
        with pytest.raises(ValueError, match=r"nested|message 0"):
            parse_conversation(f'{{"messages": [{message}]}}'.encode())


def test_a_link_in_place_of_an_output_s_lock_makes_no_file(preprocess: Any, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("words")
    (tmp_path / ".out_text_document.lock").symlink_to(tmp_path / "made through a link")
    assert preprocess("--input", tmp_path / "x.txt", "--output-prefix", tmp_path / "out", "--workers", 1) == 0
    assert not (tmp_path / "made through a link").exists()


def test_templates_and_paths_in_a_text_are_text(preprocess: Any, tmp_path: Path, marker: Path) -> None:
    text = f"{{{{ {_code(marker)} }}}} ${{oc.env:HOSTILE_SECRET}} $(mkdir {marker}) !!python/name:os.system ../../etc"
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert preprocess("--input", tmp_path / "x.jsonl", "--output-prefix", tmp_path / "out", "--workers", 1) == 0
    assert IndexedDataset(tmp_path / "out_text_document").get(0).tolist() == list(text.encode())


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "txt.gz", "txt.zst"])
def test_a_line_that_outgrows_memory_is_refused_while_it_is_read(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gigabyte of one letter, 30 KB to 1 MB packed; the limit is a gigabyte and made smaller here."""
    monkeypatch.setattr(preprocess_input, "MOST_DOCUMENT_BYTES", 1 << 24)
    path = tmp_path / f"x.{ending}"
    block = bytes(1 << 24)
    if ending.endswith(".zst"):
        library = pytest.importorskip("zstandard")
        packer = library.ZstdCompressor().compressobj()
        path.write_bytes(b"".join(packer.compress(block) for _ in range(64)) + packer.flush())
    elif ending.endswith(".gz"):
        path.write_bytes(gzip.compress(block, 1) * 64)
    else:
        os.truncate(os.open(path, os.O_RDWR | os.O_CREAT), 1 << 40)  # a hole
    with pytest.raises(DataFileError, match=rf"{re.escape(str(path))}: got a line or a text of more than"):
        list(preprocess_encode.read_texts([str(path)], ["text"], skip_bad_lines=False))


def test_a_conversation_that_outgrows_memory_is_refused_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "MOST_DOCUMENT_BYTES", 1 << 24)
    (tmp_path / "x.jsonl").touch()
    os.truncate(tmp_path / "x.jsonl", 1 << 40)
    with pytest.raises(DataFileError, match=r"x\.jsonl, line 1: got more than 16777216 bytes"):
        ConversationFile(tmp_path / "x.jsonl", build_tokenizer("ByteTokenizer"))


def test_pickles_inside_a_parquet_file_are_left_alone(tmp_path: Path, marker: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    bait = pickle.dumps(Bait(marker))
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": bait}
    schema = arrow.schema([arrow.field("text", arrow.string(), metadata=extension)], metadata={b"pandas": bait})
    parquet.write_table(arrow.table([arrow.array(["words"])], schema=schema), tmp_path / "x.parquet")
    assert list(preprocess_encode.read_texts([str(tmp_path / "x.parquet")], ["text"], False)) == ["words"]
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + bait + struct.pack("<I", 2**31) + b"PAR1")
    with pytest.raises(DataFileError, match=r"x\.parquet cannot be read"):
        list(preprocess_encode.read_texts([str(tmp_path / "x.parquet")], ["text"], False))


# --------------------------------------------------------------------------------------------------------- train.py


def _hostile_options(folder: Path, marker: Path) -> dict[str, tuple[list[str], Path]]:
    """Returns what is hostile -> (options, the file that the message must name)."""
    bait = folder / "bait"
    bait.write_bytes(pickle.dumps(Bait(marker)))
    corpus = write_corpus(folder / "c")
    (folder / "huge.idx").write_bytes(_index(2**60, 2**60))
    (folder / "huge.bin").write_bytes(b"")
    deep = folder / "deep.json"
    deep.write_bytes(b"[" * 100_000)
    tokenizer = ["--data-path", corpus, "--tokenizer-type"]
    return {
        "tokenizer": ([*tokenizer, "HuggingFaceTokenizer", "--tokenizer-model", str(bait)], bait),
        "vocabulary": ([*tokenizer, "GPT2BPETokenizer", "--vocab-file", str(bait), "--merge-file", str(bait)], bait),
        "index": (["--data-path", str(folder / "huge")], folder / "huge.idx"),
        "list": (["--data-args-path", str(bait)], bait),
        "list by split": (["--per-split-data-args-path", str(deep)], deep),
        "conversations": (["--sft", "--data-path", str(bait), "--tokenizer-type", "ByteTokenizer"], bait),
    }


@pytest.mark.parametrize("kind", ["tokenizer", "vocabulary", "index", "list", "list by split", "conversations"])
def test_the_program_names_a_hostile_file_and_ends_with_status_2(
    kind: str, tmp_path: Path, marker: Path, capsys: Any
) -> None:
    options, path = _hostile_options(tmp_path, marker)[kind]
    run = [*MODEL, "--vocab-size", "257", "--padded-vocab-size", "264", "--train-iters", "2", "--eval-iters", "0"]
    cache = ["--compilation-cache-dir", str(jax.config.jax_compilation_cache_dir)]
    try:
        status = program.main([*run, *cache, *options])
    except SystemExit as leave:
        status = leave.code
    out, err = capsys.readouterr()
    assert status == 2, err
    assert err.count("train.py: error: ") == 1
    assert str(path) in err
    assert "Traceback" not in err
    assert "compiling" not in out
