"""Megatron-LM flags that are no options here: aliases, flags without effect, unsupported ones (no communication).

A launch line of the reference can be pasted: a flag stands either in `sections` or in one of these tables, or it is
unknown. To support a flag, delete its row in `UNSUPPORTED` and add a field.

Reference: `megatron/training/arguments.py`.
"""

from typing import Any, NamedTuple


class Alias(NamedTuple):
    """A flag that sets another option to a fixed value."""

    flag: str
    name: str
    value: Any
    # A weak alias only replaces the default: a YAML file and any other flag win.
    weak: bool = False


class ValueAlias(NamedTuple):
    """A value that is spelled otherwise here, on the command line and in a file."""

    name: str
    value: str
    own: str


class OtherFlag(NamedTuple):
    """A flag that is recognised without being an option.

    Attributes:
        flag: Its spelling.
        values: How many values may follow it; `MANY` for any number.
        reason: Why it has no effect, or why it is refused.
        choices: The values that have no effect, where others would mean something; empty when none does.
    """

    flag: str
    values: int
    reason: str
    choices: tuple[str, ...] = ()


MANY = -1

ALIASES = (
    Alias("--swiglu", "activation", "swiglu"),
    Alias("--squared-relu", "activation", "squared_relu"),
    Alias("--openai-gelu", "activation", "gelu_tanh"),
    # Without its fusion the reference computes the exact GELU; gated activations do not care.
    Alias("--no-bias-gelu-fusion", "activation", "gelu_erf", weak=True),
    Alias("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
    Alias("--recompute-activations", "recompute_granularity", "selective"),
    Alias("--override-opt_param-scheduler", "override_opt_param_scheduler", True),
)

VALUE_ALIASES = (
    ValueAlias("cp_comm_type", "allgather", "all_gather"),
    ValueAlias("attention_backend", "flash", "fused"),
    ValueAlias("attention_backend", "local", "unfused"),
)

_ONE_MODEL = "there is one implementation of the model"
_XLA_FUSES = "XLA decides what to fuse"
_XLA_COMM = "XLA and JAX choose how devices communicate"
_FP32 = "always on"
_ORBAX = "checkpoints are written by Orbax"
_CHECKPOINTS_OWN = "the checkpoint's schedules go on unless --override-opt-param-scheduler is given"
_LOGGED = "always in the log line and the metrics file"
_TORCH = "speaks of PyTorch's runtime, which is not used"

IGNORED = (
    OtherFlag("--use-mcore-models", 0, _ONE_MODEL),
    OtherFlag("--use-legacy-models", 0, _ONE_MODEL),
    OtherFlag("--transformer-impl", 1, _ONE_MODEL),
    OtherFlag("--use-flash-attn", 0, "--attention-backend chooses the kernel"),
    OtherFlag("--attention-softmax-in-fp32", 0, _FP32),
    OtherFlag("--apply-query-key-layer-scaling", 0, "it cancels out of a softmax in float32"),
    OtherFlag("--no-query-key-layer-scaling", 0, "it is never applied"),
    OtherFlag("--no-masked-softmax-fusion", 0, _XLA_FUSES),
    OtherFlag("--no-bias-swiglu-fusion", 0, _XLA_FUSES),
    OtherFlag("--no-bias-dropout-fusion", 0, _XLA_FUSES),
    OtherFlag("--no-rope-fusion", 0, _XLA_FUSES),
    OtherFlag("--no-persist-layer-norm", 0, _XLA_FUSES),
    OtherFlag("--no-gradient-accumulation-fusion", 0, _XLA_FUSES),
    OtherFlag("--cross-entropy-loss-fusion", 0, "the loss never gathers logits anyway"),
    OtherFlag("--cross-entropy-fusion-impl", 1, "the loss never gathers logits anyway"),
    OtherFlag("--no-async-tensor-model-parallel-allreduce", 0, _XLA_COMM),
    OtherFlag("--distributed-backend", 1, _XLA_COMM),
    OtherFlag("--use-ring-exchange-p2p", 0, _XLA_COMM),
    OtherFlag("--nccl-communicator-config-path", 1, _XLA_COMM),
    OtherFlag("--ddp-bucket-size", 1, _XLA_COMM),
    OtherFlag("--no-contiguous-buffers-in-local-ddp", 0, _XLA_COMM),
    OtherFlag("--no-scatter-gather-tensors-in-pipeline", 0, _XLA_COMM),
    OtherFlag("--ddp-num-buckets", 1, _XLA_COMM),
    OtherFlag("--ddp-pad-buckets-for-high-nccl-busbw", 0, _XLA_COMM),
    OtherFlag("--ddp-average-in-collective", 0, _XLA_COMM),
    OtherFlag("--no-gradient-reduce-div-fusion", 0, _XLA_FUSES),
    OtherFlag("--no-overlap-p2p-communication", 0, _XLA_COMM),
    OtherFlag("--no-align-param-gather", 0, _XLA_COMM),
    OtherFlag("--use-nccl-ub", 0, _XLA_COMM),
    OtherFlag(
        "--moe-token-dispatcher-type",
        1,
        "tokens always go to their experts by an all-to-all",
        ("allgather", "alltoall", "flex"),
    ),
    OtherFlag("--moe-grouped-gemm", 0, "a device's experts are always one batched product"),
    OtherFlag("--moe-permute-fusion", 0, _XLA_FUSES),
    OtherFlag("--moe-router-fusion", 0, _XLA_FUSES),
    OtherFlag("--local-rank", 1, "JAX finds out which process it is"),
    OtherFlag("--lazy-mpu-init", 1, _TORCH),
    OtherFlag("--use-cpu-initialization", 0, "initial weights never depend on the layout"),
    OtherFlag("--empty-unused-memory-level", 1, _TORCH),
    OtherFlag("--manual-gc", 0, _TORCH),
    OtherFlag("--manual-gc-interval", 1, _TORCH),
    OtherFlag("--no-manual-gc-eval", 0, _TORCH),
    OtherFlag("--disable-jit-fuser", 0, _TORCH),
    OtherFlag("--ckpt-format", 1, _ORBAX),
    OtherFlag("--dist-ckpt-format", 1, _ORBAX),
    OtherFlag("--use-dist-ckpt", 0, _ORBAX),
    OtherFlag("--auto-detect-ckpt-format", 0, _ORBAX),
    OtherFlag("--ckpt-fully-parallel-save", 0, _ORBAX),
    OtherFlag("--ckpt-fully-parallel-load", 0, _ORBAX),
    OtherFlag("--ckpt-assume-constant-structure", 0, _ORBAX),
    OtherFlag("--use-checkpoint-opt_param-scheduler", 0, _CHECKPOINTS_OWN),
    OtherFlag("--use-checkpoint-opt-param-scheduler", 0, _CHECKPOINTS_OWN),
    OtherFlag("--num-dataset-builder-threads", 1, "index files are built by one vectorised pass"),
    OtherFlag("--no-mmap-bin-files", 0, "files are always memory-mapped"),
    OtherFlag("--no-create-attention-mask-in-dataloader", 0, "the causal mask is never stored"),
    OtherFlag("--create-attention-mask-in-dataloader", 0, "the causal mask is never stored"),
    OtherFlag("--no-position-embedding", 0, "--position-embedding-type alone decides"),
    OtherFlag("--log-throughput", 0, _LOGGED),
    OtherFlag("--log-progress", 0, _LOGGED),
    OtherFlag("--log-learning-rate-to-tensorboard", 0, _LOGGED),
    OtherFlag("--log-loss-scale-to-tensorboard", 0, _LOGGED),
    OtherFlag("--log-batch-size-to-tensorboard", 0, _LOGGED),
    OtherFlag("--log-validation-ppl-to-tensorboard", 0, _LOGGED),
    OtherFlag("--tensorboard-log-interval", 1, "--log-interval decides"),
    OtherFlag("--tensorboard-queue-size", 1, "every log line is written at once"),
    OtherFlag("--timing-log-level", 1, "one program per step has no inner timers; --profile shows them"),
    OtherFlag("--timing-log-option", 1, "one program per step has no inner timers; --profile shows them"),
    OtherFlag("--log-timers-to-tensorboard", 0, "one program per step has no inner timers; --profile shows them"),
    OtherFlag("--barrier-with-L1-time", 0, "one program per step has no inner timers"),
    OtherFlag("--no-barrier-with-level-1-timing", 0, "one program per step has no inner timers"),
    OtherFlag("--no-one-logger", 0, "there is no such logger"),
    OtherFlag("--use-pytorch-profiler", 0, "--profile records a JAX trace"),
    OtherFlag("--exit-signal-handler", 0, "SIGTERM and SIGINT always end a run after a step, with a checkpoint"),
    OtherFlag("--straggler-minmax-count", 1, "--log-straggler shows every process"),
)

_CONTEXT = "every sequence is divided over all context-parallel devices, in one of the ways of --cp-comm-type"
_EXPERTS = "of mixtures of experts only the options of --help are implemented"
_SHARDED = "of sharded state only --use-distributed-optimizer is implemented"
_FP8 = "8-bit arithmetic is not implemented"
_DATA = "samples are cut from packed documents only"
_CHECKPOINT = "a checkpoint is always saved whole; --no-load-optim and --finetune restore a part"
_OPTIMIZERS = "adam, sgd, lion and muon are the optimizers"
_MUON = "muon has no such switch here"
_LOG = "this figure is not logged yet"
_ATTENTION = "only plain and grouped-query attention are implemented"

UNSUPPORTED = (
    OtherFlag("--fp8-format", 1, _FP8),
    OtherFlag("--fp8-recipe", 1, _FP8),
    OtherFlag("--fp8-margin", 1, _FP8),
    OtherFlag("--fp8-param-gather", 0, _FP8),
    OtherFlag("--fp4-format", 1, _FP8),
    OtherFlag("--use-precision-aware-optimizer", 0, _SHARDED),
    OtherFlag("--use-torch-fsdp2", 0, _SHARDED),
    OtherFlag("--use-megatron-fsdp", 0, _SHARDED),
    OtherFlag("--num-distributed-optimizer-instances", 1, _SHARDED),
    OtherFlag("--overlap-param-gather-with-optimizer-step", 0, _SHARDED),
    OtherFlag("--main-grads-dtype", 1, _SHARDED),
    OtherFlag("--main-params-dtype", 1, _SHARDED),
    OtherFlag("--exp-avg-dtype", 1, _SHARDED),
    OtherFlag("--exp-avg-sq-dtype", 1, _SHARDED),
    OtherFlag("--grad-reduce-in-bf16", 0, "gradients are summed in float32"),
    OtherFlag("--fp16-lm-cross-entropy", 0, "the loss is computed in float32"),
    OtherFlag("--data-parallel-sharding-strategy", 1, _SHARDED),
    OtherFlag("--optimizer-cpu-offload", 0, _SHARDED),
    OtherFlag("--distribute-saved-activations", 0, "with --sequence-parallel they are divided already"),
    OtherFlag("--hierarchical-context-parallel-sizes", MANY, _CONTEXT),
    OtherFlag("--hybrid-context-parallel", 0, _CONTEXT),
    OtherFlag("--max-seqlen-per-dp-cp-rank", 1, _CONTEXT),
    OtherFlag("--moe-input-jitter-eps", 1, _EXPERTS),
    OtherFlag("--moe-token-dropping", 0, _EXPERTS),
    OtherFlag("--moe-extended-tp", 0, _EXPERTS),
    OtherFlag("--moe-apply-probs-on-input", 0, _EXPERTS),
    OtherFlag("--moe-router-force-load-balancing", 0, _EXPERTS),
    OtherFlag("--moe-router-padding-for-fp8", 0, _EXPERTS),
    OtherFlag("--moe-router-padding-for-quantization", 0, _EXPERTS),
    OtherFlag("--moe-use-legacy-grouped-gemm", 0, _EXPERTS),
    OtherFlag("--moe-use-upcycling", 0, _EXPERTS),
    OtherFlag("--moe-upcycling-granularity", 1, _EXPERTS),
    OtherFlag("--moe-layer-recompute", 0, _EXPERTS),
    OtherFlag("--moe-shared-expert-overlap", 0, _EXPERTS),
    OtherFlag("--moe-shared-expert-gate", 0, _EXPERTS),
    OtherFlag("--moe-enable-deepep", 0, _EXPERTS),
    OtherFlag("--moe-deepep-num-sms", 1, _EXPERTS),
    OtherFlag("--moe-flex-dispatcher-backend", 1, _EXPERTS),
    OtherFlag("--moe-hybridep-num-sms", 1, _EXPERTS),
    OtherFlag("--moe-per-layer-logging", 0, _EXPERTS),
    OtherFlag("--moe-latent-size", 1, _EXPERTS),
    OtherFlag("--multi-latent-attention", 0, _ATTENTION),
    OtherFlag("--window-attn-skip-freq", 1, "all layers have the same --window-size"),
    OtherFlag("--kv-lora-rank", 1, _ATTENTION),
    OtherFlag("--q-lora-rank", 1, _ATTENTION),
    OtherFlag("--hybrid-layer-pattern", 1, "all layers are transformer layers"),
    OtherFlag("--spec", MANY, "there is one implementation of a layer"),
    OtherFlag("--no-rope-freq", 1, "every layer rotates"),
    OtherFlag("--mtp-num-layers", 1, "multi-token prediction is not implemented yet"),
    OtherFlag("--quick-geglu", 0, "a gate of quick GELU is not among the activations; see --activation"),
    OtherFlag("--apply-residual-connection-post-layernorm", 0, "only layers with the norm before are implemented"),
    OtherFlag("--fp32-residual-connection", 0, "the residual stream has the compute dtype"),
    OtherFlag("--init-method-xavier-uniform", 0, "initial weights are normally distributed"),
    OtherFlag("--yaml-cfg", 1, "--config FILE reads YAML, with the sections that configs/README.md shows"),
    OtherFlag("--apply-wd-to-qk-layernorm", 0, "norms are exempt from weight decay"),
    OtherFlag("--embedding-init-method-std", 1, "--init-method-std serves all weights"),
    OtherFlag("--rampup-batch-size", 3, "the reference ignores it nowadays; the global batch size is constant here"),
    OtherFlag("--step-batch-size-schedule", 1, "the global batch size is constant"),
    OtherFlag("--decrease-batch-size-if-needed", 0, "the global batch size is constant"),
    OtherFlag("--muon-no-split-qkv", 0, "queries, keys and values are always orthogonalised by themselves"),
    OtherFlag("--muon-nesterov", 0, _MUON),
    OtherFlag("--muon-scale-mode", 1, "it is always spectral, the default; --muon-extra-scale-factor multiplies it"),
    OtherFlag("--muon-fp32-matmul-prec", 1, _MUON),
    OtherFlag("--muon-coefficient-type", 1, "the coefficients are always quintic, the default"),
    OtherFlag("--muon-num-ns-steps", 1, "there are always 5 steps, the default"),
    OtherFlag("--muon-tp-mode", 1, "whole matrices are orthogonalised, as by duplicated, the default"),
    OtherFlag("--muon-use-syrk", 0, _MUON),
    OtherFlag("--muon-scalar-optimizer", 1, "what is no matrix is always left to adam, the default"),
    OtherFlag("--sft-tokenizer-prompt-format", 1, "there is one template for conversations, see data/README.md"),
    OtherFlag("--no-load-rng", 0, _CHECKPOINT),
    OtherFlag("--no-save-optim", 0, _CHECKPOINT),
    OtherFlag("--no-save-rng", 0, _CHECKPOINT),
    OtherFlag("--use-checkpoint-args", 0, "the options given apply, and are compared with the checkpoint's"),
    OtherFlag("--save-retain-interval", 1, "--keep-latest and --keep-every say what stays"),
    OtherFlag("--non-persistent-save-interval", 1, "--save-interval and --save-interval-minutes say when to save"),
    OtherFlag("--pretrained-checkpoint", 1, "--load with --finetune starts from the weights of a checkpoint"),
    OtherFlag("--skip-train", 0, "evaluation alone is not implemented"),
    OtherFlag("--log-params-norm", 0, _LOG),
    OtherFlag("--log-num-zeros-in-grad", 0, _LOG),
    OtherFlag("--log-memory-to-tensorboard", 0, _LOG),
    OtherFlag("--profile-ranks", MANY, "the trace is that of the first process so far"),
    OtherFlag("--tp-comm-overlap", 0, "overlap of tensor-parallel communication is not implemented yet"),
    OtherFlag("--deterministic-mode", 0, "not implemented; XLA_FLAGS=--xla_gpu_deterministic_ops=true does it on GPUs"),
    OtherFlag("--enable-cuda-graph", 0, "CUDA graphs are XLA's affair; see --xla_gpu_enable_command_buffer"),
)
"""Flags that are known and refused. Deleting a row is what it takes to free the name for a field."""

UNSUPPORTED_FAMILIES = (
    ("--moe-", _EXPERTS),
    ("--fp8-", _FP8),
    ("--fp4-", _FP8),
    ("--fsdp-", _SHARDED),
    ("--megatron-fsdp-", _SHARDED),
    ("--optimizer-offload-", _SHARDED),
    ("--soap-", _OPTIMIZERS),
    ("--adaptive-muon-", _OPTIMIZERS),
    ("--yarn-", "of scaled rotary frequencies only --use-rope-scaling is implemented"),
    ("--mamba-", "all layers are transformer layers"),
    ("--fim-", _DATA),
    ("--rl-", "reinforcement learning is not a part of jmegatron"),
    ("--grpo-", "reinforcement learning is not a part of jmegatron"),
    ("--inference-", "serving is not a part of jmegatron"),
    ("--inprocess-", "restarting inside a process is not a part of jmegatron"),
    ("--dino-", "vision models are not a part of jmegatron"),
    ("--vision-", "vision models are not a part of jmegatron"),
    ("--bert-", "only GPT models are implemented so far"),
)
"""(beginning, reason): flags refused by how they begin, unless a row above or an option names them, or nearly so."""

SINGLE_VALUES = {
    "moe_router_load_balancing_type": "several balancing types at once are not supported",
    "moe_aux_loss_coeff": "several balancing types at once, each with its coefficient, are not supported",
}
"""Options that take several values in the reference, by name -> why they take one here."""
