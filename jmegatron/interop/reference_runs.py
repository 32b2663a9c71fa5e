"""Forward, gradients and optimizer steps of a model elsewhere: recorded, by transformers, or by Megatron-Core.

The last two run on the CPU. No communication. Source: Megatron-LM pretrain_gpt.py (loss_func), training/training.py
(train_step), core/models/gpt/gpt_model.py. torch, transformers and megatron.core are optional and imported where they
are used. What comes back is numpy, fp32, under their names; `pieces` says which of our arrays they are.

Megatron-Core asks for a GPU wherever it goes. `_cuda_on_cpu` makes those calls mean the CPU while it runs; its package
is not touched, and torch is afterwards what it was before.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib.util
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmegatron.errors import UsageError
from jmegatron.interop.safetensors_folder import SafetensorsFolder, parse_json
from jmegatron.models.gpt import GPTSettings
from jmegatron.ops.activations import is_gated
from jmegatron.optimizer.optimizers import OptimizerSettings
from jmegatron.optimizer.schedules import LearningRateSchedule, WeightDecaySchedule

Arrays = Mapping[str, np.ndarray]
Batch = Mapping[str, np.ndarray]
"""tokens, labels (integer) and loss_mask (fp32), [sequences, seq] each."""

EMBEDDING, FINAL_NORM = "embedding", "final norm"


def activation_names(layer: int) -> tuple[str, str, str]:
    """Returns what the activations of a layer are called: attention and MLP with bias, without residual; its output."""
    return f"layer {layer} attention", f"layer {layer} mlp", f"layer {layer} output"


@dataclasses.dataclass(frozen=True)
class ReferenceStep:
    """What a reference makes of one batch. What it does not say is None."""

    logits: np.ndarray | None = None
    """[sequences, seq, vocabulary]."""
    token_losses: np.ndarray | None = None
    """[sequences, seq], masked tokens too."""
    loss: float | None = None
    """Mean over the tokens that count."""
    gradients: Arrays | None = None
    """Of that mean, by their names."""
    activations: Arrays | None = None
    """[sequences, seq, hidden] by `activation_names`."""


@dataclasses.dataclass(frozen=True)
class ReferenceTrajectory:
    """What a reference makes of some optimizer steps."""

    loss: np.ndarray
    """float64 [steps], before the step."""
    grad_norm: np.ndarray
    """float64 [steps], before clipping."""
    lr: np.ndarray
    """float64 [steps], of the step itself."""
    weights: Arrays
    """After the last step, by their names."""


def check_installed(reference: str) -> None:
    """Checks that what a reference ("transformers", "megatron"; others need nothing) is made of is installed.

    Raises:
      UsageError: it is not.
    """
    needed = {"transformers": ("torch", "transformers"), "megatron": ("torch", "megatron.core")}.get(reference, ())
    how = {
        "transformers": "pip install jmegatron[hf] jmegatron[torch]",
        "megatron": "pip install jmegatron[torch] einops, and pip install --no-deps megatron-core",
    }
    for name in needed:
        try:
            there = importlib.util.find_spec(name) is not None
        except ImportError:
            there = False
        if not there:
            raise UsageError(f"--reference {reference}: needs {name}, which is not installed; fix: {how[reference]}")


# ---- what both have in common -------------------------------------------------------------------------------------
class TorchReference:
    """A model of torch. Subclasses say how it is called and where its activations are."""

    name: str
    """What the output calls it."""
    model: Any

    def step(self, batch: Batch, *, gradients: bool = True, activations: bool = False) -> ReferenceStep:
        """Returns what the model makes of a batch.

        Args:
          batch: the batch.
          gradients: with the gradients of the loss.
          activations: with the activations.
        """
        import torch

        kept: dict[str, Any] = {}
        with self._environment(), contextlib.ExitStack() as hooks:
            if activations:
                for handle in self._hooks(kept):
                    hooks.callback(handle.remove)
            with torch.no_grad():
                logits = self._logits(_tensor(batch["tokens"]))
            hooks.close()
            with torch.set_grad_enabled(gradients):
                losses = self._token_losses(batch)
                loss = _mean(losses, batch)
            if gradients:
                self.model.zero_grad()
                loss.backward()
            return ReferenceStep(
                _numpy(logits),
                _numpy(losses),
                float(loss.detach()),
                {n: _numpy(p.grad) for n, p in self.model.named_parameters()} if gradients else None,
                {name: _numpy(value) for name, value in kept.items()} if activations else None,
            )

    def train(
        self,
        batches: Sequence[Batch],
        micro_batch_size: int,
        settings: OptimizerSettings,
        schedule: LearningRateSchedule,
    ) -> ReferenceTrajectory:
        """Returns what training makes of the model, which is another one afterwards.

        Args:
          batches: one a step; every token counts.
          micro_batch_size: sequences of a micro-batch.
          settings: numbers of adam.
          schedule: of the learning rate, which is set in samples.
        """
        raise NotImplementedError

    def _environment(self) -> Any:
        return contextlib.nullcontext()

    def _logits(self, tokens: Any) -> Any:
        raise NotImplementedError

    def _token_losses(self, batch: Batch) -> Any:
        raise NotImplementedError

    def _hooks(self, kept: dict[str, Any]) -> Iterator[Any]:
        """Yields the handles of hooks that fill `kept`."""
        raise NotImplementedError

    def _load(self, weights: Arrays) -> None:
        """Copies weights into the model.

        Raises:
          UsageError: the model has others.
        """
        import torch

        own = dict(self.model.named_parameters())
        wrong = [f"{name} is missing" for name in own.keys() - weights.keys()]
        wrong += [f"{name} has no place" for name in weights.keys() - own.keys()]
        for name in own.keys() & weights.keys():
            if tuple(own[name].shape) != weights[name].shape:
                wrong.append(f"{name} is {list(weights[name].shape)}, expected {list(own[name].shape)}")
        if wrong:
            raise UsageError(
                f"{self.name}: got weights that are not its model's: {'; '.join(sorted(wrong)[:8])}; fix: give the"
                " options of the model that the weights belong to"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(_tensor(weights[name]))


def _tensor(array: np.ndarray) -> Any:
    import torch

    tensor = torch.from_numpy(np.array(array))
    return tensor if tensor.is_floating_point() else tensor.long()


def _numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def _mean(losses: Any, batch: Batch) -> Any:
    """Returns the mean over the tokens that count."""
    mask = _tensor(batch["loss_mask"])
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def _microbatches(batch: Batch, size: int) -> list[Batch]:
    rows = len(batch["tokens"])
    return [{name: array[first : first + size] for name, array in batch.items()} for first in range(0, rows, size)]


def _weight_decay(settings: OptimizerSettings, count: int) -> float:
    decay = settings.weight_decay
    return float(decay.in_float64(np.asarray(count))) if isinstance(decay, WeightDecaySchedule) else decay


# ---- recordings ---------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Recording:
    """What Megatron-Core once made of some weights and tokens."""

    path: Path
    weights: Arrays
    """By Megatron's names, as everything here."""
    batch: Batch
    step: ReferenceStep
    train_tokens: np.ndarray | None
    """Integer [steps, sequences, seq + 1]."""
    trajectory: ReferenceTrajectory | None
    train_settings: Mapping[str, Any]
    """What the recorded steps were done with, as far as the folder says it."""


def read_recording(folder: str) -> Recording:
    """Returns a folder's recordings: weights.safetensors, forward.npz, and of the rest what there is.

    grads.safetensors holds the gradients; trajectory.npz, final_weights.safetensors (or trained_weights.safetensors)
    and config.json the optimizer steps, in the folder itself or in train_NAME beside or inside it.

    Raises:
      UsageError: a file is missing or cannot be read, or arrays hold no numbers or do not fit together.
    """
    path = Path(folder)
    if not (path / "forward.npz").is_file() or not (path / "weights.safetensors").is_file():
        raise UsageError(
            f"--reference recorded {folder}: got no weights.safetensors and forward.npz there, expected the folder of a"
            " recorded model; fix: check the path"
        )
    weights, forward = _safetensors(path / "weights.safetensors"), _npz(path / "forward.npz")
    batch = {name: forward.get(f"batch/{name}") for name in ("tokens", "labels", "loss_mask")}
    shapes = {name: None if array is None else array.shape for name, array in batch.items()}
    if len(set(shapes.values())) != 1 or len(shapes["tokens"] or ()) != 2:
        got = ", ".join(f"batch/{name} {shape or 'missing'}" for name, shape in shapes.items())
        raise UsageError(
            f"{path / 'forward.npz'}: got {got}; expected the same [sequences, seq] of each; fix: record it again"
        )
    where, gradients = str(path / "forward.npz"), path / "grads.safetensors"
    whole = {name: _token_ids(where, f"batch/{name}", forward[f"batch/{name}"]) for name in ("tokens", "labels")}
    mask = _of_kind(where, "batch/loss_mask", forward["batch/loss_mask"], "fiub")
    whole["loss_mask"] = mask.astype(np.float32)
    found = {n: _of_kind(where, n, forward[n], "fiu") for n in ("logits", "token_loss", "loss") if n in forward}
    loss = found.get("loss")
    if loss is not None and loss.size != 1:
        raise UsageError(f"{where}: loss: got {list(loss.shape)}, expected one number; fix: record it again")
    step = ReferenceStep(
        logits=found.get("logits"),
        token_losses=found.get("token_loss"),
        loss=None if loss is None else float(loss.item()),
        gradients=_safetensors(gradients) if gradients.is_file() else None,
        activations=_recorded_activations(forward, weights, shapes["tokens"] or (), where),
    )
    homes = (path, path.parent / f"train_{path.name}", path / f"train_{path.name}")
    home = next((home for home in homes if (home / "trajectory.npz").is_file()), None)
    tokens, trajectory, settings = (None, None, {}) if home is None else _recorded_steps(home)
    return Recording(path, weights, whole, step, tokens, trajectory, settings)


def _of_kind(where: str, name: str, array: np.ndarray, kinds: str) -> np.ndarray:
    """Returns the array.

    Raises:
      UsageError: its values are of none of numpy's kinds (i and u whole numbers, f floating point, b boolean).
    """
    if array.dtype.kind not in kinds:
        expected = "numbers" if "f" in kinds else "whole numbers"
        raise UsageError(f"{where}: {name}: got values of {array.dtype}, expected {expected}; fix: record it again")
    return array


def _token_ids(where: str, name: str, array: np.ndarray) -> np.ndarray:
    """Returns tokens as int32; what that cannot hold stays outside every vocabulary."""
    whole = _of_kind(where, name, array, "iu").astype(np.int64)
    return np.clip(whole, -1, np.iinfo(np.int32).max).astype(np.int32)


def _recorded_activations(
    forward: Arrays, weights: Arrays, batch_shape: tuple[int, ...], where: str
) -> dict[str, np.ndarray] | None:
    """Returns activations as ours are: [sequences, seq, hidden], attention and MLP with their output biases."""
    found = {}

    def add(name: str, recorded: str, bias: str | None = None) -> None:
        if recorded not in forward:
            return
        value = _of_kind(where, recorded, forward[recorded], "fiu")
        added = weights.get(bias or "", np.zeros(1, np.float32))
        if value.ndim != 3 or value.shape[1::-1] != batch_shape or added.shape not in ((1,), value.shape[2:]):
            raise UsageError(
                f"{where}: {recorded}: got {list(value.shape)}, expected [seq, sequences, hidden] of the batch"
                f" {list(batch_shape)}; fix: record it again"
            )
        found[name] = np.swapaxes(value, 0, 1) + added

    add(EMBEDDING, "act/embedding_out")
    numbers = [re.fullmatch(r"act/layer_(\d+)_(?:attn_out|mlp_out|out)", name) for name in forward]
    for layer in sorted({int(number[1]) for number in numbers if number is not None}):
        attention, feed_forward, output = activation_names(layer)
        prefix = f"decoder.layers.{layer}."
        add(attention, f"act/layer_{layer}_attn_out", f"{prefix}self_attention.linear_proj.bias")
        add(feed_forward, f"act/layer_{layer}_mlp_out", f"{prefix}mlp.linear_fc2.bias")
        add(output, f"act/layer_{layer}_out")
    add(FINAL_NORM, "act/final_norm_out")
    return found or None


def _recorded_steps(home: Path) -> tuple[np.ndarray, ReferenceTrajectory, Mapping[str, Any]]:
    record = _npz(home / "trajectory.npz")
    shapes = {name: record[name].shape for name in ("tokens", "loss", "grad_norm", "lr_used") if name in record}
    steps = shapes.get("tokens", ())[:1]
    if len(shapes) < 4 or len(shapes["tokens"]) != 3 or any(shapes[n] != steps for n in shapes if n != "tokens"):
        got = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none of them"
        raise UsageError(
            f"{home / 'trajectory.npz'}: got {got}; expected tokens [steps, sequences, seq + 1], and loss, grad_norm"
            " and lr_used [steps]; fix: record it again"
        )
    where = str(home / "trajectory.npz")
    tokens = _token_ids(where, "tokens", record["tokens"])
    loss, norms, rates = (_of_kind(where, name, record[name], "fiu") for name in ("loss", "grad_norm", "lr_used"))
    names = ("final_weights.safetensors", "trained_weights.safetensors")
    last = next((home / name for name in names if (home / name).is_file()), None)
    settings = {}
    if (home / "config.json").is_file():
        settings = parse_json((home / "config.json").read_bytes(), str(home / "config.json"))
    trajectory = ReferenceTrajectory(loss, norms, rates, {} if last is None else _safetensors(last))
    return tokens, trajectory, settings


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFolder.of_file(path)
    return {name: file.read(name) for name in file.tensors}


def _npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: cannot be read: {error}; fix: give a file that numpy.savez wrote") from error


# ---- Hugging Face transformers ------------------------------------------------------------------------------------
class TransformersReference(TorchReference):
    """A model of Hugging Face transformers: GPT-2, or one with the names of Llama.

    Args:
      folder: of config.json and safetensors.
      weights: by their names; None: those of the folder.

    Raises:
      UsageError: transformers is not installed, or cannot load the folder.
    """

    def __init__(self, folder: str, weights: Arrays | None = None):
        check_installed("transformers")
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation="eager",
            )
        except Exception as error:  # whatever it is that its own code says of a folder
            what = " ".join(str(error).split())[:300]
            raise UsageError(
                f"--hf-folder {folder}: transformers cannot load it: {type(error).__name__}: {what}; fix: give a folder"
                " with config.json and safetensors files"
            ) from error
        self.model = model.to(torch.float32).eval()  # eval: nothing is dropped
        self.name = f"transformers {transformers.__version__} ({type(model).__name__})"
        self._body: Any = getattr(model, "transformer", None) or getattr(model, "model", None)
        if self._body is None or not (hasattr(self._body, "h") or hasattr(self._body, "layers")):
            raise UsageError(
                f"--hf-folder {folder}: got a {type(model).__name__}, expected a model with the names of GPT-2 or Llama"
            )
        if weights is not None:
            self._load(weights)

    def _logits(self, tokens: Any) -> Any:
        return self.model(input_ids=tokens, use_cache=False).logits

    def _token_losses(self, batch: Batch) -> Any:
        import torch

        logits = self._logits(_tensor(batch["tokens"]))
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), _tensor(batch["labels"]), reduction="none")

    def _hooks(self, kept: dict[str, Any]) -> Iterator[Any]:
        gpt2 = hasattr(self._body, "h")
        layers = self._body.h if gpt2 else self._body.layers

        def keep(name: str) -> Callable[..., None]:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                kept[name] = output[0] if isinstance(output, tuple) else output

            return hook

        def first_input(module: Any, inputs: Any, keywords: Any) -> None:
            kept[EMBEDDING] = inputs[0] if inputs else keywords["hidden_states"]

        yield layers[0].register_forward_pre_hook(first_input, with_kwargs=True)
        for number, layer in enumerate(layers):
            parts = (layer.attn if gpt2 else layer.self_attn, layer.mlp, layer)
            for name, module in zip(activation_names(number), parts, strict=True):
                yield module.register_forward_hook(keep(name))
        yield (self._body.ln_f if gpt2 else self._body.norm).register_forward_hook(keep(FINAL_NORM))

    def train(
        self,
        batches: Sequence[Batch],
        micro_batch_size: int,
        settings: OptimizerSettings,
        schedule: LearningRateSchedule,
    ) -> ReferenceTrajectory:
        """Returns what torch's AdamW makes of the model; biases and scales do not decay. The learning rate is given."""
        import torch

        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "decays": True},
            {"params": [p for p in parameters if p.ndim <= 1], "decays": False},
        ]
        optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps)
        rows = []
        for count, batch in enumerate(batches):
            lr = float(schedule.in_float64(np.asarray(count)))
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = lr, _weight_decay(settings, count) if group["decays"] else 0.0
            optimizer.zero_grad()
            parts = _microbatches(batch, micro_batch_size)
            total = 0.0
            for part in parts:
                loss = _mean(self._token_losses(part), part) / len(parts)
                loss.backward()
                total += float(loss.detach())
            norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_grad or float("inf"))
            optimizer.step()
            rows.append((total, float(norm), lr))
        loss, norm, rate = np.array(rows, np.float64).T
        return ReferenceTrajectory(loss, norm, rate, {n: _numpy(p) for n, p in self.model.named_parameters()})


# ---- Megatron-Core ------------------------------------------------------------------------------------------------
class MegatronReference(TorchReference):
    """A GPTModel of Megatron-Core with its local layers, one process, fp32.

    Args:
      settings: the model.
      weights: by their names.

    Raises:
      UsageError: megatron.core is not installed, or the model is none of its.
    """

    def __init__(self, settings: GPTSettings, weights: Arrays):
        check_installed("megatron")
        a, layer = settings.layer.attention, settings.layer
        for differs, what in (
            (layer.zero_centered_norm, "--apply-layernorm-1p (its local norms do not have it)"),
            (layer.attention.qk_norm not in (None, layer.normalization), "norms of another kind for queries and keys"),
        ):
            if differs:
                raise UsageError(f"--reference megatron: got {what}; fix: compare a model without it")
        with _cuda_on_cpu(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the parts of its that are not installed
            import megatron.core as core
            import torch
            from megatron.core import parallel_state
            from megatron.core.models.gpt import GPTModel
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
            from megatron.core.transformer.transformer_config import TransformerConfig

            if not torch.distributed.is_initialized():
                # Of one process, and so without a port.
                torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            if not parallel_state.model_parallel_is_initialized():
                parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(1234)
            # The fused activations are these formulas as well; without fusion any function can be given.
            config = TransformerConfig(
                num_layers=settings.num_layers,
                hidden_size=a.hidden_size,
                num_attention_heads=a.num_heads,
                num_query_groups=a.num_kv_heads,
                kv_channels=a.head_dim,
                ffn_hidden_size=layer.mlp.ffn_hidden_size,
                normalization=layer.normalization,
                layernorm_epsilon=layer.norm_eps,
                activation_func=_activation(layer.mlp.activation),
                gated_linear_unit=is_gated(layer.mlp.activation),
                add_bias_linear=layer.mlp.use_bias,
                add_qkv_bias=a.use_qkv_bias and not layer.mlp.use_bias,
                qk_layernorm=a.qk_norm is not None,
                window_size=None if a.window is None else (a.window, 0),
                rotary_interleaved=a.rotary_interleaved,
                bias_activation_fusion=False,
                bias_dropout_fusion=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_cpu_initialization=True,
                params_dtype=torch.float32,
                pipeline_dtype=torch.float32,
            )
            spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
            rope = settings.position_embedding == "rope"
            self.model = GPTModel(
                config,
                spec,
                vocab_size=settings.loss_vocab_size or settings.padded_vocab_size,
                max_sequence_length=settings.max_positions,
                position_embedding_type=settings.position_embedding,
                share_embeddings_and_output_weights=settings.tied,
                rotary_percent=settings.rotary_dim / a.head_dim if rope else 1.0,
                rotary_base=settings.rotary_base,
                rope_scaling=settings.rotary_scaling is not None,
                rope_scaling_factor=8.0 if settings.rotary_scaling is None else settings.rotary_scaling.factor,
                seq_len_interpolation_factor=(
                    None if settings.rotary_interpolation == 1.0 else settings.rotary_interpolation
                ),
            )
        self.name = f"Megatron-Core {core.__version__}"
        self._load(weights)

    def _environment(self) -> Any:
        return _cuda_on_cpu()

    @staticmethod
    def _positions(tokens: Any) -> Any:
        import torch

        return torch.arange(tokens.shape[1]).expand_as(tokens)

    def _logits(self, tokens: Any) -> Any:
        return self.model(tokens, self._positions(tokens), None)

    def _token_losses(self, batch: Batch) -> Any:
        tokens = _tensor(batch["tokens"])
        return self.model(tokens, self._positions(tokens), None, labels=_tensor(batch["labels"]))

    def _hooks(self, kept: dict[str, Any]) -> Iterator[Any]:
        def keep(name: str, module: Any, inputs: Any, output: Any) -> None:
            if name.endswith((" attention", " mlp")):  # (without bias, bias or None)
                value = output[0] if output[1] is None else output[0] + output[1]
            else:
                value = output[0] if isinstance(output, tuple) else output
            kept[name] = value.transpose(0, 1)  # theirs are [seq, sequences, hidden]

        modules = {EMBEDDING: self.model.embedding, FINAL_NORM: self.model.decoder.final_layernorm}
        for number, layer in enumerate(self.model.decoder.layers):
            modules |= zip(activation_names(number), (layer.self_attention, layer.mlp, layer), strict=True)
        for name, module in modules.items():
            yield module.register_forward_hook(functools.partial(keep, name))

    def train(
        self,
        batches: Sequence[Batch],
        micro_batch_size: int,
        settings: OptimizerSettings,
        schedule: LearningRateSchedule,
    ) -> ReferenceTrajectory:
        """Returns what Megatron-Core's own buffers, schedule functions, optimizer and scheduler make of the model."""
        with _cuda_on_cpu(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._train(batches, micro_batch_size, settings, schedule)

    def _train(
        self,
        batches: Sequence[Batch],
        micro_batch_size: int,
        settings: OptimizerSettings,
        schedule: LearningRateSchedule,
    ) -> ReferenceTrajectory:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.pipeline_parallel import get_forward_backward_func

        config = self.model.config
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        wrapped = DistributedDataParallel(config, buffers, self.model)
        optimizer, scheduler = _megatron_optimizer(wrapped, settings, schedule)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func, config.no_sync_func = optimizer.scale_loss, wrapped.no_sync

        def forward_step(parts: Any, model: Any) -> Any:
            part = next(parts)
            tokens, mask = _tensor(part["tokens"]), _tensor(part["loss_mask"])
            losses = model(tokens, self._positions(tokens), None, labels=_tensor(part["labels"]))

            def loss(losses: Any) -> Any:
                total, count = (losses * mask).sum(), mask.sum().int()
                return total, count, {"loss": (float(total.detach()), int(count))}

            return losses, loss

        rows = []
        for batch in batches:
            parts = _microbatches(batch, micro_batch_size)
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            reported = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(parts),
                model=wrapped,
                num_microbatches=len(parts),
                seq_length=batch["tokens"].shape[1],
                micro_batch_size=micro_batch_size,
                forward_only=False,
            )
            total, count = np.array([part["loss"] for part in reported], np.float64).sum(0)
            lr = optimizer.param_groups[0]["lr"]
            _, norm, _ = optimizer.step()
            scheduler.step(increment=len(batch["tokens"]))
            rows.append((total / count, float(norm), lr))
        loss, norms, rates = np.array(rows, np.float64).T
        return ReferenceTrajectory(loss, norms, rates, {n: _numpy(p) for n, p in self.model.named_parameters()})


def _megatron_optimizer(wrapped: Any, settings: OptimizerSettings, schedule: LearningRateSchedule) -> tuple[Any, Any]:
    """Returns Megatron-Core's optimizer and its scheduler, which counts in samples."""
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    config = OptimizerConfig(
        optimizer="adam",
        lr=schedule.peak,
        min_lr=schedule.minimum,
        weight_decay=_weight_decay(settings, 0),
        clip_grad=settings.clip_grad,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        params_dtype=torch.float32,
    )
    optimizer = get_megatron_optimizer(config, [wrapped])
    decay = settings.weight_decay
    if not isinstance(decay, WeightDecaySchedule):
        decay = WeightDecaySchedule(style="constant", start=decay, end=decay, steps=schedule.decay)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.warmup_start,
        max_lr=schedule.peak,
        min_lr=schedule.minimum,
        lr_warmup_steps=schedule.warmup,
        lr_decay_steps=schedule.decay,
        lr_decay_style=schedule.style,
        start_wd=decay.start,
        end_wd=decay.end,
        wd_incr_steps=decay.steps,
        wd_incr_style=decay.style,
        wsd_decay_steps=schedule.wsd_decay,
        lr_wsd_decay_style=schedule.wsd_style,
    )
    return optimizer, scheduler


def _activation(name: str) -> Callable[[Any], Any]:
    import torch
    from torch.nn import functional

    return {
        "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
        "geglu": functools.partial(functional.gelu, approximate="tanh"),
        "gelu_erf": functional.gelu,
        "geglu_erf": functional.gelu,
        "swiglu": functional.silu,
        "squared_relu": lambda x: torch.square(functional.relu(x)),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }[name]


# ---- a GPU that is not there --------------------------------------------------------------------------------------
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "empty_like", "ones_like", "rand")


@contextlib.contextmanager
def _cuda_on_cpu() -> Iterator[None]:
    """Lets calls that ask for a GPU mean the CPU."""
    import torch
    import torch._dynamo as dynamo

    cpu = torch.device("cpu")

    def on_cpu(device: Any) -> Any:
        return cpu if isinstance(device, str | torch.device) and str(device).startswith("cuda") else device

    def factory(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **keywords: Any) -> Any:
            if "device" in keywords:
                keywords["device"] = on_cpu(keywords["device"])
            return make(*arguments, **keywords)

        return made

    def moved(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        if "device" in keywords:
            keywords["device"] = on_cpu(keywords["device"])
        return move(tensor, *map(on_cpu, arguments), **keywords)

    def typed(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        found = type_of(tensor, *arguments, **keywords)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found  # it asserts this name

    move, type_of = torch.Tensor.to, torch.Tensor.type
    dynamo_config: Any = dynamo.config
    with contextlib.ExitStack() as undo:

        def replace(owner: Any, **values: Any) -> None:
            for name, value in values.items():
                undo.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

        replace(torch, **{name: factory(getattr(torch, name)) for name in _FACTORIES})
        replace(torch.Tensor, to=moved, type=typed, cuda=lambda tensor, *_, **__: tensor)
        replace(torch.nn.Module, cuda=lambda module, *_, **__: module)
        replace(
            torch.cuda,
            current_device=lambda: cpu,
            device_count=lambda: 1,
            synchronize=lambda *_: None,
            empty_cache=lambda: None,
            manual_seed=torch.manual_seed,
            default_generators=collections.defaultdict(lambda: torch.default_generator),
            is_current_stream_capturing=lambda: False,
            _lazy_call=lambda call, **_: call(),
            _lazy_init=lambda: None,
        )
        for module in (torch.cuda, torch.cuda.random):
            replace(
                module,
                get_rng_state=lambda *_, **__: torch.get_rng_state(),
                set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
            )
        replace(dynamo_config, disable=True)  # it compiles small functions, for minutes
        yield
