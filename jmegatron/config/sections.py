"""The options of a run, one frozen dataclass per section (no communication).

Names are Megatron-LM's flags in snake_case, and so are the defaults unless a docstring says "own option". The
string under each field is its help text, its row in `configs/README.md` and the only place where it is explained.
`None` stands for "derived" or "not set"; `jmegatron.config.resolution` fills in what is derived.

Reference: `megatron/training/arguments.py` and `megatron/core/transformer/transformer_config.py`.
"""

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["gelu_tanh", "gelu_erf", "squared_relu", "quick_gelu", "swiglu", "geglu", "geglu_erf"]
TokenizerType = Literal[
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    "NullTokenizer",
]
PipelineSchedule = Literal["1f1b", "interleaved", "1f1b-low-memory", "gpipe"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of the model."""

    num_layers: int
    """Number of transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Number of query heads of each attention layer."""
    seq_length: int
    """Tokens in one training sequence."""
    ffn_hidden_size: int | None = None
    """Width of the feed-forward layer. Derived: 4 * hidden_size; for swiglu two thirds of that, rounded down to a multiple of 64."""  # noqa: E501
    group_query_attention: bool = False
    """Let several query heads share one key/value head; their number is num_query_groups."""
    num_query_groups: int | None = None
    """Number of key/value heads, counted only with group_query_attention. Derived: 1 with it, else num_attention_heads."""  # noqa: E501
    kv_channels: int | None = None
    """Width of one attention head. Derived: hidden_size / num_attention_heads."""
    max_position_embeddings: int | None = None
    """Rows of the table of learned positions, at least seq_length; must be given for learned_absolute. Derived otherwise: seq_length."""  # noqa: E501
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter: a learned table, rotation of queries and keys, or not at all."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies (rope only)."""
    rotary_percent: float = 1.0
    """Part of each head's channels that is rotated, in (0, 1] (rope only)."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels (even, odd) together instead of the two halves of a head."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Divide rotary positions by this factor, for sequences longer than those of the pre-training."""
    use_rope_scaling: bool = False
    """Slow rotations down as Llama 3.1 does, for sequences longer than its first 8192 tokens: what turns at most once in those by rope_scaling_factor, what turns 4 times or more not at all, and gradually between (rope only)."""  # noqa: E501
    rope_scaling_factor: float = 8.0
    """How much slower the slowest rotations get, at least 1; counts only with use_rope_scaling."""
    window_size: str | None = None
    """LEFT,RIGHT: let a token see itself and at most LEFT tokens before it (-1: all). RIGHT must be 0 or -1, which mean the same in a causal model. Not set: all tokens before it."""  # noqa: E501
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of every norm layer; RMSNorm has no bias."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside every norm."""
    apply_layernorm_1p: bool = False
    """Store each norm's scale as its distance from 1 (zero-centred)."""
    activation: Activation | None = None
    """Own option: feed-forward activation. Derived as the reference's fusion rules have it: gelu_tanh with linear biases, gelu_erf with disable_bias_linear. swiglu and geglu are gated."""  # noqa: E501
    disable_bias_linear: bool = False
    """Leave the biases out of all linear layers."""
    add_qkv_bias: bool = False
    """Keep the bias of the query/key/value projection although disable_bias_linear is set."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a matrix of its own instead of the word embedding's."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys before attention."""
    hidden_dropout: float = 0.1
    """Dropout probability on the embeddings and on both outputs of each layer, in [0, 1)."""
    attention_dropout: float = 0.1
    """Dropout probability on the attention probabilities, in [0, 1)."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    vocab_size: int | None = None
    """Number of token ids. Derived: the tokenizer's."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times tensor_model_parallel_size, and of pipeline_model_parallel_size times the latter."""  # noqa: E501
    padded_vocab_size: int | None = None
    """Own option: rows of the embedding, at least vocab_size and divisible by tensor_model_parallel_size * pipeline_model_parallel_size. Fixing it keeps the shapes of the model independent of the layout. Derived from make_vocab_size_divisible_by."""  # noqa: E501
    mask_padded_vocab: bool = True
    """Own option: padded rows take no part in the softmax, so every layout gives the same loss. Off: the reference's behaviour, where they do."""  # noqa: E501

    num_experts: int | None = None
    """Experts of each mixture-of-experts layer, in place of the feed-forward layer. Not set: a dense model."""
    moe_layer_freq: str | None = None
    """Which layers have experts: N for every N-th, beginning with the first, or a list with 1 or 0 for each layer, such as '([0]*1+[1]*3)*2'. Not set: all."""  # noqa: E501
    moe_ffn_hidden_size: int | None = None
    """Width of each expert. Derived: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of a feed-forward layer that every token passes beside its experts. Not set: there is none."""
    moe_router_topk: int = 2
    """Experts of each token."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, so that a token's weights do not sum to 1; needed with moe_router_topk 1. Of softmax only."""  # noqa: E501
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits; the sigmoids of a token's experts are divided by their sum."""
    moe_router_enable_expert_bias: bool = False
    """Choose experts by score plus a bias that follows their loads from step to step. Needs sigmoid."""
    moe_router_bias_update_rate: float = 1e-3
    """What a step adds to the bias of an expert with fewer tokens than the mean, and takes from that of one with more. Needs moe_router_enable_expert_bias."""  # noqa: E501
    moe_router_num_groups: int | None = None
    """Divide the experts into so many groups, of which each token uses moe_router_group_topk."""
    moe_router_group_topk: int | None = None
    """Groups of each token, those whose best moe_router_topk / moe_router_group_topk scores have the largest sum."""
    moe_router_topk_scaling_factor: float | None = None
    """Multiply the weights of each token's experts by this."""
    moe_router_dtype: Literal["fp32"] | None = None
    """Multiply hidden states and the router's matrix in this type. Not set: in that of the model; scores are float32."""  # noqa: E501
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"] = "aux_loss"
    """Over which tokens the auxiliary loss evens out the loads: those of a micro-batch of one replica, of each sequence, or of a micro-batch of all replicas."""  # noqa: E501
    moe_aux_loss_coeff: float = 0.0
    """Weight of the auxiliary loss in the objective; 0 is none."""
    moe_z_loss_coeff: float | None = None
    """Weight in the objective of the mean of the squared log-sum-exp of the router's logits. Not set: none."""
    moe_expert_capacity_factor: float | None = None
    """Let an expert take at most this times its even share of a device's tokens, and drop the others. Not set: none are dropped."""  # noqa: E501
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens an expert keeps when there are too many: those of the largest weights, or the first."""
    moe_pad_expert_input_to_capacity: bool = False
    """Multiply as many rows as the capacity has room for, however many there are. Needs moe_expert_capacity_factor."""
    moe_receive_bound_factor: float | None = None
    """Own option: memory for the rows that a device receives, over those of an even load, at least 1; rows beyond it are dropped and counted. Not set: memory for all that can come, and none are dropped. Acts with expert_model_parallel_size above 1 only: else a device receives what it has."""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the mesh; data parallelism takes the devices that are left."""

    tensor_model_parallel_size: int = 1
    """Devices that share each layer's matrices (mesh axis tp)."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are cut into (mesh axis pp); embedding and output layer are divided over all of them."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of one chunk, to give each stage several chunks of layers: a smaller bubble for more communication."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Chunks of each stage, another way to say the same; 1 means that stages are not cut further."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first stage, over all its chunks; the other stages share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last stage, over all its chunks; the other stages share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Give the first chunk one layer less, as if the embedding were a layer of it."""
    account_for_loss_in_pipeline_split: bool = False
    """Give the last chunk one layer less, as if the output layer were a layer of it."""
    pipeline_model_parallel_layout: str | None = None
    """The layers of every chunk, such as 'Et*3|(tt|)*6tL': entries separated by |, E embedding, t layer, L loss, x*n and (...)*n repeat; entry k is chunk k // p of stage k % p. E and L cost no place. Instead of the six options above."""  # noqa: E501
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Micro-batches that go through a chunk before the stage turns to its next one, at least pipeline_model_parallel_size; counts only with several chunks. Derived at each step: as near to pipeline_model_parallel_size as groups of nearly equal size can be (exactly that where it divides the micro-batches)."""  # noqa: E501
    pipeline_schedule: PipelineSchedule | None = None
    """Own option: order of forward and backward passes. 1f1b; interleaved, with several chunks a stage; 1f1b-low-memory, which keeps at most as many micro-batches as there are stages; gpipe, to compare with. Derived: 1f1b, or interleaved with several chunks a stage."""  # noqa: E501
    context_parallel_size: int = 1
    """Devices that share each sequence (mesh axis cp); seq_length must be a multiple of twice their number."""
    cp_comm_type: tuple[str, ...] = ("p2p",)
    """How attention reaches the tokens that other context-parallel devices hold. p2p: keys and values go round a ring; all_gather: those of the whole sequence, for one layer at a time; a2a: tokens are exchanged for heads, which needs a multiple of context_parallel_size of key/value heads on each tensor-parallel device. One value, or one for each layer."""  # noqa: E501
    expert_model_parallel_size: int = 1
    """Devices that share the experts of a layer (mesh axis ep); for everything else they are data-parallel ones."""
    expert_tensor_parallel_size: int | None = None
    """Devices that share each expert's matrices: tensor_model_parallel_size, or 1 for whole experts on each of them. Derived: tensor_model_parallel_size."""  # noqa: E501
    sequence_parallel: bool = False
    """Shard norms, dropout and residual over the sequence on the tp axis. Without effect at tensor_model_parallel_size 1."""  # noqa: E501
    use_distributed_optimizer: bool = False
    """Divide master weights and moments over the data-parallel devices: gradients are reduce-scattered and updated parameters gathered once a step, instead of an all-reduce and the whole state on each device."""  # noqa: E501
    overlap_grad_reduce: bool = False
    """Reduce each layer's gradients while backward of the last micro-batch still runs. The results are the same."""
    overlap_param_gather: bool = False
    """Gather each layer's parameters while forward of the first micro-batch runs. Needs use_distributed_optimizer and overlap_grad_reduce. The results are the same."""  # noqa: E501
    auto_parallel: bool = False
    """Own option: let the planner choose the degrees above except cp_comm_type, the chunks, micro_batch_size and recomputation, for the devices at hand or num_gpus of a dry run. What the command line gives of these stays; what a YAML file says of them gives way."""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from; exactly one source: data_path, data_args_path, train_data_path with its companions, per_split_data_args_path, mock_data or demo_data."""  # noqa: E501

    data_path: tuple[str, ...] = ()
    """Prefix of the .bin/.idx pair to train on. Several: a blend, `WEIGHT PREFIX ...`, or `PREFIX ...` to read each sample of each corpus at most once."""  # noqa: E501
    train_data_path: tuple[str, ...] = ()
    """Corpora of training alone, written as for data_path and read whole; not with split."""
    valid_data_path: tuple[str, ...] = ()
    """Corpora of validation alone. Needs train_data_path."""
    test_data_path: tuple[str, ...] = ()
    """Corpora of the test alone. Needs train_data_path."""
    data_args_path: str | None = None
    """File with what would stand after data_path."""
    per_split_data_args_path: str | None = None
    """JSON file with the keys train, valid and test: what would stand after train_data_path, valid_data_path and test_data_path."""  # noqa: E501
    mid_level_dataset_surplus: float = 0.005
    """Part of its samples that each corpus of a weighted blend is built larger, since a blend does not keep its shares exactly at each moment."""  # noqa: E501
    dataloader_type: Literal["single", "cyclic"] = "single"
    """Order of the samples: single, as the index has them; cyclic, shuffled once more in each epoch of them."""
    no_data_sharding: bool = False
    """With cyclic: shuffle all samples together instead of a part for each data-parallel rank; the samples of a step then do not depend on the number of ranks."""  # noqa: E501
    num_workers: int = 1
    """Threads that build batches ahead of the step (processes in the reference, 2 by default); 0 builds each batch when it is needed. The batches are the same."""  # noqa: E501
    mock_data: bool = False
    """Train on made-up tokens, to measure speed."""
    demo_data: bool = False
    """Own option: train on text found in the Python standard library; needs no download."""
    split: str | None = None
    """Shares of training, validation and test documents, such as 969,30,1. Derived: 969,30,1, where the parts have no corpora of their own."""  # noqa: E501
    tokenizer_type: TokenizerType = "ByteTokenizer"
    """ByteTokenizer (own option, built in: one token per byte), HuggingFaceTokenizer (a local tokenizer.json), SentencePieceTokenizer, TikTokenizer, GPT2BPETokenizer (vocab_file and merge_file), or NullTokenizer (ids below vocab_size as text; vocab_size itself ends a document)."""  # noqa: E501
    tokenizer_model: str | None = None
    """The tokenizer's file: tokenizer.json or the folder that holds it, a SentencePiece model, or TikTokenizer's JSON vocabulary."""  # noqa: E501
    vocab_file: str | None = None
    """vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt of GPT2BPETokenizer."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """How TikTokenizer cuts text before it merges bytes. Derived: v2."""
    tiktoken_num_special_tokens: int = 1000
    """Ids that TikTokenizer keeps for special tokens, the lowest ones."""
    tiktoken_special_tokens: tuple[str, ...] = ()
    """Names of the first of them, among them <unk> <s> </s> <mask> <pad> <cls> <sep>. Derived: these seven."""
    data_cache_path: str | None = None
    """Folder that keeps index files between runs, and the demo corpus. Derived where it is used: index files are built at each start and not kept; the demo corpus lies in the user's cache folder."""  # noqa: E501
    eod_mask_loss: bool = False
    """Give end-of-document tokens no weight in the loss."""
    reset_position_ids: bool = False
    """Start positions at 0 again after each end-of-document token."""
    sft: bool = False
    """Supervised fine-tuning: data_path names one file of JSON lines {"messages": [{"role": ..., "content": ...}, ...]}; only the assistant's words have a loss, and packed conversations do not see one another."""  # noqa: E501
    reset_attention_mask: bool = False
    """Let tokens see only those of their own document (an end-of-document token belongs to the document it ends)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and the schedules of learning rate and weight decay."""

    optimizer: Literal["adam", "sgd", "lion", "muon"] = "adam"
    """adam (weight decay decoupled from the gradient), sgd with momentum (weight decay added to the gradient), lion, or muon: matrices are orthogonalised layer by layer, all else is left to adam."""  # noqa: E501
    lr: float
    """Highest learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    decoupled_lr: float | None = None
    """Highest learning rate of word embedding and output layer. Not set: lr."""
    decoupled_min_lr: float | None = None
    """Their learning rate at the end of the decay; counts only with decoupled_lr. Not set: min_lr."""
    lr_decay_style: Literal["linear", "cosine", "constant", "inverse-square-root", "WSD"] = "linear"
    """How the learning rate falls after the warm-up. WSD: it stays, and falls in a last phase."""
    lr_decay_iters: int | None = None
    """Iterations, warm-up included, after which min_lr is reached. Derived with train_iters: the same."""
    lr_decay_samples: int | None = None
    """The same in samples, for runs counted in them. Derived with train_samples: the same."""
    lr_warmup_iters: int = 0
    """Iterations over which the learning rate rises linearly."""
    lr_warmup_samples: int = 0
    """The same in samples, for runs counted in them."""
    lr_warmup_fraction: float | None = None
    """The same as a part of lr_decay_iters or lr_decay_samples, in [0, 1); not together with the two above."""
    lr_warmup_init: float = 0.0
    """Learning rate that the warm-up starts from."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """How the learning rate falls in the last phase of WSD."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of WSD's last phase, which ends with the decay."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples, for runs counted in them."""
    weight_decay: float = 0.01
    """Weight decay; biases and norms are exempt."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start_weight_decay to end_weight_decay over the run; constant: it is weight_decay."""
    start_weight_decay: float | None = None
    """Weight decay of the first step; needed where it grows, and only there."""
    end_weight_decay: float | None = None
    """Weight decay at the end of the run, at least start_weight_decay; needed where it grows, and only there."""
    adam_beta1: float = 0.9
    """Decay of the mean of gradients, in [0, 1)."""
    adam_beta2: float = 0.999
    """Decay of the mean of squared gradients, in [0, 1)."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Part of sgd's last update that the next one keeps, in [0, 1)."""
    lion_beta1: float = 0.95
    """Share of the mean of gradients in lion's update, in [0, 1)."""
    lion_beta2: float = 0.98
    """Decay of lion's mean of gradients, in [0, 1)."""
    muon_momentum: float = 0.9
    """Decay of muon's mean of gradients, in [0, 1)."""
    muon_extra_scale_factor: float = 1.0
    """Factor of muon's update of a matrix, beside the root of its longer side; 0.2 gives it the size of adam's."""
    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    calculate_per_token_loss: bool = False
    """Weigh every token of the global batch equally, instead of averaging the means of micro-batches."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batches, duration, evaluation and precision."""

    micro_batch_size: int
    """Sequences that one data-parallel rank computes at a time."""
    global_batch_size: int | None = None
    """Sequences per optimizer step. Derived: micro_batch_size * data-parallel size."""
    train_iters: int | None = None
    """Optimizer steps of the whole run; either this or train_samples is needed. Derived with train_samples: train_samples / global_batch_size, rounded down."""  # noqa: E501
    train_samples: int | None = None
    """Length of the run in samples instead; warm-up and decay are then given in samples, too."""
    eval_interval: int = 1000
    """Steps between two evaluations."""
    eval_iters: int = 100
    """Global batches per evaluation; 0 turns evaluation off."""
    exit_interval: int | None = None
    """Stop when the step is divisible by this."""
    exit_duration_in_mins: int | None = None
    """Stop, with a checkpoint if save is given, after the step in which this many minutes since the start are over."""
    seed: int = 1234
    """Seed of initialisation, dropout and data order."""
    bf16: bool = False
    """Compute in bfloat16; master weights, gradients and moments stay float32."""
    fp16: bool = False
    """Compute in float16 with loss scaling; master weights and moments stay float32. A step with an inf or NaN gradient is skipped: its samples are used up, weights and learning rate stay. Not together with bf16."""  # noqa: E501
    loss_scale: float | None = None
    """Constant factor of the loss in backward, best a power of 2; needs fp16 or bf16. Not set: with fp16 the scale follows the overflows, else there is none."""  # noqa: E501
    initial_loss_scale: float = 2.0**32
    """Loss scale of the first step (fp16 without loss_scale, as the next three)."""
    min_loss_scale: float = 1.0
    """The loss scale does not fall below this."""
    loss_scale_window: int = 1000
    """Steps in a row without inf and NaN after which the loss scale doubles."""
    hysteresis: int = 2
    """Steps with inf or NaN, counted anew only when the scale doubles, from which on each of them halves it."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Add up and reduce gradients in float32 with fp16, too; with bf16 and in float32 that is always so."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop at a loss or gradient that is inf or NaN, and say where it is. Derived with fp16 and no loss_scale: off, since such steps are skipped."""  # noqa: E501
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Steps between two checks that replicated weights are the same bit by bit on all their devices; not set: none."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Compute activations again in the backward pass instead of keeping them. full: keep the input of layers alone; selective: also their queries, keys, values, attention output and MLP pre-activation, so that no product with a weight is computed twice."""  # noqa: E501
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers are recomputed, with granularity full. uniform: all, recompute_num_layers at a time; block: the first recompute_num_layers of each chunk of a pipeline stage (without chunks: of each stage). Derived with full: uniform."""  # noqa: E501
    recompute_num_layers: int | None = None
    """With granularity full and method uniform: consecutive layers of a chunk of which the first one's input alone is kept; the last of them may be fewer. With method block: recomputed layers of a chunk. A number over the chunk's layers means all. Derived with uniform: 1."""  # noqa: E501
    recompute_modules: tuple[str, ...] = ()
    """Parts of a layer that are recomputed, with granularity selective: core_attn (the scores, which no attention here keeps; its output is kept), layernorm (adds nothing: norms are always recomputed), mlp (the pre-activation is not kept). Derived with selective: core_attn."""  # noqa: E501
    label_smoothing: float = 0.0
    """Own option: probability mass spread over the whole vocabulary, in [0, 1)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    save: str | None = None
    """Folder that checkpoints are written to."""
    load: str | None = None
    """Folder that the run resumes from: its newest whole checkpoint; without one the run starts afresh."""
    exit_on_missing_checkpoint: bool = False
    """Stop if the load folder holds no checkpoint, instead of starting afresh."""
    ckpt_step: int | None = None
    """Resume from the checkpoint of this step. Needs load. Not set: the newest."""
    save_interval: int | None = None
    """Steps between two checkpoints; one more is written at the end. Needs save."""
    save_interval_minutes: float | None = None
    """Own option: save when the last checkpoint is so many minutes old: what a failure may cost. Needs save."""
    async_save: bool = True
    """Write checkpoints in the background while training goes on; --no-async-save: wait for each."""
    keep_latest: int | None = None
    """Own option: keep so many of the newest checkpoints and remove older ones. Needs save. Not set: all are kept."""
    keep_every: int | None = None
    """Own option: never remove checkpoints of steps that this divides. Needs keep_latest."""
    no_load_optim: bool = False
    """Resume the weights and the step, but begin the optimizer anew. Needs load."""
    finetune: bool = False
    """Start a new run, from step 0 and the first sample, with the weights of the checkpoint. Needs load."""
    override_opt_param_scheduler: bool = False
    """Where learning rate, weight decay or their schedules differ from the checkpoint's, those given apply. Not set: the checkpoint's go on."""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run reports and where."""

    log_interval: int = 100
    """Steps between two log lines."""
    metrics_file: str | None = None
    """Own option: file that takes one JSON object per log line and evaluation; written on at its end if it is there."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    wandb_project: str | None = None
    """Weights & Biases project (needs the extra `wandb`)."""
    wandb_exp_name: str | None = None
    """Name of the run in Weights & Biases. Needs wandb_project."""
    progress_bar: bool = True
    """Own option: show a progress bar when standard error is a terminal."""
    log_ranks: bool = False
    """Own option: print once which device, process and machine holds which place of the mesh."""
    log_straggler: bool = False
    """Compare at each log line how long the processes themselves take for a step, and name a slow one."""
    profile: bool = False
    """Record a JAX trace from profile_step_start to profile_step_end."""
    profile_step_start: int = 10
    """First step of the trace."""
    profile_step_end: int = 12
    """Step before which the trace ends."""
    profile_dir: str | None = None
    """Own option: folder of the trace. Derived where it is used: tensorboard_dir, else `profile`."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Devices, compilation and processes."""

    num_cpu_devices: int | None = None
    """Own option: run on this many virtual CPU devices, in each process. Derived: the accelerators that JAX finds."""
    compilation_cache_dir: str | None = None
    """Own option: folder that keeps compiled programs between runs. Derived where it is used: the user's cache folder."""  # noqa: E501
    no_compilation_cache: bool = False
    """Own option: compile afresh in every run."""
    attention_backend: Literal["auto", "fused", "unfused"] = "auto"
    """fused: cuDNN's kernel, stops where it cannot serve; unfused: plain XLA; auto: fused where it can serve."""
    distributed_timeout_minutes: int = 10
    """Minutes that processes wait for one another before they stop: to connect, and for a step."""
    coordinator_address: str | None = None
    """Own option: HOST:PORT of process 0, where the processes of a job meet. Derived: as the launcher's variables say (SLURM, Open MPI, Kubernetes); without them one process trains alone."""  # noqa: E501
    num_processes: int | None = None
    """Own option: processes of the job; 1 looks at no launcher's variables. Derived as coordinator_address."""
    process_id: int | None = None
    """Own option: number of this process, from 0. Derived as coordinator_address."""
    xla_flags: str | None = None
    """Own option: XLA options of the training step, such as "xla_gpu_enable_latency_hiding_scheduler=false", over the recommended ones; the environment's XLA_FLAGS win over both."""  # noqa: E501
    no_recommended_xla_flags: bool = False
    """Own option: set no XLA option but those of xla_flags."""
    dry_run: bool = False
    """Own option: compile the training step for GPUs that need not be there, report memory, traffic and time, and exit; with status 3 if it does not fit."""  # noqa: E501
    target_gpu: Literal["a100", "h100", "h200", "b200"] = "h100"
    """Own option: GPU of a dry run."""
    num_gpus: int | None = None
    """Own option: GPUs of a dry run. Derived: those of one replica of the model."""
    gpus_per_node: int = 8
    """Own option: GPUs of a dry run that NVLink joins."""
    report: str | None = None
    """Own option: folder that takes a dry run's report.json and report.html."""
    assumed_tflops: float | None = None
    """Own option: model TFLOP/s of a GPU that a dry run takes for its step time. Not set: a roofline of card and links."""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run depends on."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    ignored_flags: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)
    """(flag, reason) of each Megatron flag on the command line that has no effect here, for the start-up log."""
    fixed_options: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Those of `PLANNED` that the command line gives, with auto_parallel."""


PLANNED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "pipeline_schedule",
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "micro_batch_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
"""Options that auto_parallel decides unless the command line gives them."""

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "hardware": HardwareConfig,
}
"""Section name -> dataclass, in the order of `--help` and of the option table."""
