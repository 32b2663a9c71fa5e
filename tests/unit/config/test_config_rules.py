"""Cross-field rules and derived values."""

import dataclasses
import itertools
import re

import pytest

from jmegatron.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    attention_window,
    cp_comm_types,
    layer_split_of,
    moe_layers,
    padded_vocab_size,
    resolve,
    validate,
    validate_for_devices,
)
from jmegatron.config.layer_split import layers_at_places
from jmegatron.config.options import options
from jmegatron.errors import ConfigError, UsageError
from jmegatron.pipeline.layout import pipeline_layout

BASE = Config(
    model=ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=8, seq_length=32, max_position_embeddings=32),
    data=DataConfig(mock_data=True),
    optimizer=OptimizerConfig(lr=1e-3),
    training=TrainingConfig(micro_batch_size=2, train_iters=5),
)
INF, NAN = float("inf"), float("nan")


def changed(**values) -> Config:
    """Returns the base config with options set by leaf name."""
    config = BASE
    for name, value in values.items():
        section = options()[name].section
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    return config


def tp(size: int, **values) -> dict:
    return {"tensor_model_parallel_size": size, **values}


def cp(size: int, **values) -> dict:
    return {"context_parallel_size": size, **values}


def samples(count: int, **values) -> dict:
    return {"train_iters": None, "train_samples": count, **values}


def moe(**values) -> dict:
    return {"num_experts": 8, **values}


BAD = {
    "experts of a dense model": ({"moe_router_topk": 4}, ["moe_router_topk 4, no num_experts", "give --num-experts"]),
    "ep of a dense model": (
        {"expert_model_parallel_size": 2},
        ["expert_model_parallel_size 2", "no num_experts", "give --num-experts"],
    ),
    "experts of one in a dense model": (
        tp(2, expert_tensor_parallel_size=2),
        ["got: expert_tensor_parallel_size 2, no num_experts"],
    ),
    "one expert": (moe(num_experts=1), ["--moe-router-topk to 1 or less, with --moe-router-pre-softmax"]),
    "coefficient beyond float32": (moe(moe_aux_loss_coeff=1e38), ["moe_aux_loss_coeff", "1000000.0"]),
    "capacity beyond all": (moe(moe_expert_capacity_factor=1e308), ["moe_expert_capacity_factor", "1000000.0"]),
    "bound beyond all": (moe(moe_receive_bound_factor=1e308), ["moe_receive_bound_factor", "1000000.0"]),
    "experts not by ep": (
        moe(expert_model_parallel_size=3),
        ["num_experts 8, expert_model_parallel_size 3", "one of 1, 2, 4, 8"],
    ),
    "more experts than there are": (moe(moe_router_topk=9), ["moe_router_topk 9, num_experts 8"]),
    "one expert without pre-softmax": (moe(moe_router_topk=1), ["moe_router_topk 1", "add --moe-router-pre-softmax"]),
    "bias of softmax": (moe(moe_router_enable_expert_bias=True), ["--moe-router-score-function sigmoid"]),
    "rate without a bias": (
        moe(moe_router_bias_update_rate=0.01),
        ["moe_router_bias_update_rate 0.01 without", "add --moe-router-enable-expert-bias"],
    ),
    "pre-softmax of sigmoids": (
        moe(moe_router_pre_softmax=True, moe_router_score_function="sigmoid"),
        ["moe_router_pre_softmax with moe_router_score_function sigmoid", "leave --moe-router-pre-softmax out"],
    ),
    "coefficient without a loss": (
        moe(moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.01),
        ["moe_router_load_balancing_type none with moe_aux_loss_coeff 0.01", "set --moe-aux-loss-coeff 0"],
    ),
    "groups that do not divide": (
        moe(moe_router_num_groups=3, moe_router_group_topk=1),
        ["moe_router_num_groups 3", "num_experts 8"],
    ),
    "groups without a number": (moe(moe_router_num_groups=4), ["moe_router_group_topk None"]),
    "policy without capacity": (
        moe(moe_token_drop_policy="position"),
        ["moe_token_drop_policy, no moe_expert_capacity_factor", "give --moe-expert-capacity-factor"],
    ),
    "a part of tp for experts": (
        tp(4, num_experts=8, expert_tensor_parallel_size=2),
        ["expert_tensor_parallel_size 2", "tensor_model_parallel_size 4", "1 or 4"],
    ),
    "expert not by tp": (tp(4, num_experts=8, moe_ffn_hidden_size=30), ["moe_ffn_hidden_size 30", "32"]),
    "pattern of another length": (moe(moe_layer_freq="[0, 1, 1]"), ["'[0, 1, 1]', num_layers 2"]),
    "pattern that is none": (moe(moe_layer_freq="[1]*__import__"), ["--moe-layer-freq 2"]),
    "pattern too long": (moe(moe_layer_freq="[1]*99999999999"), ["num_layers 2"]),
    "pattern that differs from stage to stage": (
        moe(moe_layer_freq="[0]*1+[1]*3", num_layers=4, pipeline_model_parallel_size=2),
        ["none in layer 1 and experts in layer 3", "the same pattern in each of the 2 chunks"],
    ),
    "heads not by tp": (tp(3), ["num_attention_heads 8", "tensor_model_parallel_size 3", "1, 2, 4, 8"]),
    "hidden not by heads": ({"hidden_size": 60}, ["hidden_size 60", "num_attention_heads 8", "--kv-channels"]),
    "groups without flag": ({"num_query_groups": 2}, ["num_query_groups 2", "add --group-query-attention"]),
    "heads not by groups": (
        {"group_query_attention": True, "num_query_groups": 3},
        ["num_query_groups 3", "num_attention_heads 8"],
    ),
    "groups and tp": (
        tp(4, group_query_attention=True, num_query_groups=6, num_attention_heads=12, hidden_size=96),
        ["num_query_groups 6", "tensor_model_parallel_size 4", "repeated"],
    ),
    "ffn not by tp": (tp(4, ffn_hidden_size=130), ["ffn_hidden_size 130", "tensor_model_parallel_size 4", "132"]),
    "tiny swiglu": (
        {"activation": "swiglu", "hidden_size": 16, "num_attention_heads": 2},
        ["hidden_size 16", "--ffn-hidden-size"],
    ),
    "learned without size": ({"max_position_embeddings": None}, ["seq_length 32", "--max-position-embeddings 32"]),
    "positions too few": ({"max_position_embeddings": 31}, ["max_position_embeddings 31", "seq_length 32"]),
    "rotary odd": (
        {"position_embedding_type": "rope", "rotary_percent": 0.4},
        ["8 channels a head * 0.4", "--rotary-percent"],
    ),
    "rotary none": ({"position_embedding_type": "rope", "rotary_percent": 0.1}, ["= 0", "at least 2"]),
    "sequence not by tp": (
        tp(4, sequence_parallel=True, seq_length=30),
        ["seq_length 30", "tensor_model_parallel_size 4", "--no-sequence-parallel"],
    ),
    "sequence not by cp": (
        cp(3),
        ["seq_length 32, context_parallel_size 3", "2 * context_parallel_size = 6", "--seq-length to 30"],
    ),
    "sequence by cp but not twice": (cp(32), ["context_parallel_size = 64", "--seq-length to 64"]),
    "sequence not by cp and tp": (
        tp(4, context_parallel_size=2, sequence_parallel=True, seq_length=28),
        ["tensor_model_parallel_size 4, context_parallel_size 2", "= 8", "--seq-length to 32"],
    ),
    "unknown way of context parallelism": (
        {"cp_comm_type": ("p2p", "ring")},
        ["got: ring", "p2p, all_gather, a2a", "--cp-comm-type"],
    ),
    "nested way of context parallelism": (
        cp(4, cp_comm_type=("a2a+p2p",)),
        ["got: a2a+p2p", "a2a+p2p, which nests one in the other, is not implemented"],
    ),
    "ways of context parallelism for too many layers": (
        {"cp_comm_type": ("p2p", "a2a", "p2p")},
        ["3 values of cp_comm_type, num_layers 2", "one value, or 2"],
    ),
    "no way of context parallelism": ({"cp_comm_type": ()}, ["0 values of cp_comm_type"]),
    "heads of a device not by cp": (
        tp(8, context_parallel_size=2, cp_comm_type=("p2p", "a2a")),
        ["num_attention_heads 8", "num_query_groups 8", "(1 query and 1 key/value heads a device)", "all_gather"],
    ),
    "kv heads not by cp": (
        cp(4, cp_comm_type=("a2a",), group_query_attention=True, num_query_groups=2),
        ["(8 query and 2 key/value heads a device), context_parallel_size 4", "--context-parallel-size to one of 1, 2"],
    ),
    "repeated kv heads not by cp": (
        tp(4, context_parallel_size=2, cp_comm_type=("a2a",), group_query_attention=True, num_query_groups=2),
        ["num_query_groups 2, tensor_model_parallel_size 4 (2 query and 1 key/value heads a device)"],
    ),
    "different ways at one place of two stages": (
        cp(2, num_layers=4, pipeline_model_parallel_size=2, cp_comm_type=("p2p", "p2p", "a2a", "a2a")),
        ["p2p for layer 1 and a2a for layer 3, both number 1 of their chunks", "each of the 2 chunks"],
    ),
    "scaled rotary positions without rotary positions": (
        {"use_rope_scaling": True},
        ["position_embedding_type learned_absolute", "--position-embedding-type rope"],
    ),
    "window that sees later tokens": ({"window_size": "8,1"}, ["'8,1'", "--window-size 8,0"]),
    **{
        f"window {text!r}": ({"window_size": text}, [repr(text), "--window-size 128,0"])
        for text in ("-2,0", "8", "8,0,0", "a,b", "", "8.5,0", "9" * 30 + ",0")
    },
    "padded not by tp": (tp(4, padded_vocab_size=302), ["padded_vocab_size 302", "304"]),
    "padded not by pp": (
        tp(2, pipeline_model_parallel_size=2, padded_vocab_size=302),
        ["padded_vocab_size 302", "tensor_model_parallel_size 2, pipeline_model_parallel_size 2", "304"],
    ),
    "layers not by stages": (
        {"num_layers": 10, "pipeline_model_parallel_size": 4},
        ["num_layers 10, pipeline_model_parallel_size 4", "--decoder-last-pipeline-num-layers 1", "--num-layers 12"],
    ),
    "stage not by chunks": (
        {"num_layers": 20, "pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2},
        ["num_layers 20", "num_virtual_stages_per_pipeline_rank 2", "--num-layers 16", "--num-layers 24"],
    ),
    "chunks without stages": (
        {"num_virtual_stages_per_pipeline_rank": 2},
        ["pipeline_model_parallel_size 1", "--num-virtual-stages-per-pipeline-rank 1"],
    ),
    "chunks twice": (
        {
            "num_layers": 4,
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "num_layers_per_virtual_pipeline_stage": 1,
        },
        ["num_virtual_stages_per_pipeline_rank 2, num_layers_per_virtual_pipeline_stage 1", "null"],
    ),
    "layout and ends": (
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Et|tL",
            "decoder_first_pipeline_num_layers": 1,
        },
        ["pipeline_model_parallel_layout Et|tL, decoder_first_pipeline_num_layers 1"],
    ),
    "ends and places": (
        {
            "pipeline_model_parallel_size": 2,
            "account_for_loss_in_pipeline_split": True,
            "decoder_last_pipeline_num_layers": 1,
        },
        ["decoder_last_pipeline_num_layers 1, account_for_loss_in_pipeline_split true"],
    ),
    "interleaved without chunks": (
        {"pipeline_schedule": "interleaved", "pipeline_model_parallel_size": 2},
        ["pipeline_schedule interleaved, 1 chunk a stage", "--num-virtual-stages-per-pipeline-rank"],
    ),
    **{
        f"{schedule} with chunks": (
            {
                "num_layers": 4,
                "pipeline_schedule": schedule,
                "pipeline_model_parallel_size": 2,
                "num_virtual_stages_per_pipeline_rank": 2,
            },
            [f"pipeline_schedule {schedule}, 2 chunks a stage", "--pipeline-schedule interleaved"],
        )
        for schedule in ("1f1b", "gpipe", "1f1b-low-memory")
    },
    "small group of micro-batches": (
        {
            "num_layers": 8,
            "pipeline_model_parallel_size": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
            "microbatch_group_size_per_virtual_pipeline_stage": 3,
        },
        ["microbatch_group_size_per_virtual_pipeline_stage 3, pipeline_model_parallel_size 4", "stage 4"],
    ),
    "low memory with a ring of context parallelism": (
        cp(2, pipeline_schedule="1f1b-low-memory", pipeline_model_parallel_size=2),
        ["deadlock", "context_parallel_size 2, cp_comm_type p2p", "--cp-comm-type all_gather or a2a, or --pipeline"],
    ),
    "low memory with rings in some layers": (
        cp(
            2,
            num_layers=4,
            pipeline_schedule="1f1b-low-memory",
            pipeline_model_parallel_size=2,
            cp_comm_type=("a2a", "p2p", "a2a", "p2p"),
        ),
        ["deadlock", "cp_comm_type a2a p2p a2a p2p"],
    ),
    "recompute in blocks of no length": (
        {"recompute_granularity": "full", "recompute_method": "block"},
        ["recompute_method block, recompute_num_layers not given", "--recompute-num-layers"],
    ),
    "recompute other parts": (
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe_act")},
        ["recompute_modules core_attn moe_act", "--recompute-modules core_attn"],
    ),
    "recompute all but the core": (
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        ["recompute_modules mlp", "core_attn and beside it layernorm, mlp"],
    ),
    "recompute parts of whole layers": (
        {"recompute_granularity": "full", "recompute_modules": ("core_attn",)},
        ["recompute_granularity full", "--recompute-granularity selective"],
    ),
    "recompute number without granularity": (
        {"recompute_num_layers": 1},
        ["recompute_granularity not given", "--recompute-granularity full"],
    ),
    "recompute method with parts": (
        {"recompute_granularity": "selective", "recompute_method": "uniform"},
        ["recompute_method uniform, recompute_granularity selective"],
    ),
    "two precisions": ({"bf16": True, "fp16": True}, ["bf16 and fp16", "--no-bf16"]),
    "loss scale in float32": ({"loss_scale": 128.0}, ["loss_scale 128.0", "--fp16"]),
    "loss scale below its minimum": (
        {"fp16": True, "initial_loss_scale": 4.0, "min_loss_scale": 8.0},
        ["initial_loss_scale 4.0, min_loss_scale 8.0", "--min-loss-scale"],
    ),
    "parameters gathered one by one without shards": (
        {"overlap_param_gather": True},
        ["no use_distributed_optimizer and no overlap_grad_reduce", "add --use-distributed-optimizer"],
    ),
    "parameters gathered one by one after the step": (
        {"overlap_param_gather": True, "use_distributed_optimizer": True},
        ["got: overlap_param_gather, no overlap_grad_reduce", "add --overlap-grad-reduce"],
    ),
    "low memory and overlapped reductions": (
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b-low-memory", "overlap_grad_reduce": True},
        ["got: pipeline_schedule 1f1b-low-memory, overlap_grad_reduce", "leave --overlap-grad-reduce out"],
    ),
    "low memory and overlapped gathers": (
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "1f1b-low-memory",
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        ["overlap_grad_reduce and overlap_param_gather", "--pipeline-schedule 1f1b"],
    ),
    "padded below vocab": (
        {"vocab_size": 300, "padded_vocab_size": 256},
        ["padded_vocab_size 256", "300", "set it to 384"],
    ),
    "min_lr above lr": ({"min_lr": 1e-2}, ["lr 0.001", "min_lr 0.01"]),
    "warm-up start above lr": ({"lr_warmup_init": 1e-2}, ["lr_warmup_init 0.01"]),
    "warm-up twice": ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, ["0.1", "lr_warmup_iters 3"]),
    "warm-up too long": ({"lr_warmup_iters": 6}, ["lr_warmup_iters 6", "lr_decay_iters 5", "derived"]),
    "warm-up and no decay": ({"lr_warmup_iters": 5}, ["lr_warmup_iters 5", "lr_decay_iters 5", "below"]),
    "decoupled minimum alone": ({"decoupled_min_lr": 1e-4}, ["decoupled_min_lr 0.0001, no decoupled_lr"]),
    "decoupled minimum above its rate": (
        {"decoupled_lr": 1e-4, "decoupled_min_lr": 1e-3},
        ["decoupled_lr 0.0001, decoupled_min_lr 0.001"],
    ),
    "warm-up start above the decoupled rate": (
        {"decoupled_lr": 1e-4, "lr_warmup_init": 1e-3},
        ["decoupled_lr 0.0001, lr_warmup_init 0.001"],
    ),
    "no length": ({"train_iters": None}, ["neither", "--train-samples"]),
    "two lengths": ({"train_samples": 40}, ["train_iters 5, train_samples 40", "--train-iters null"]),
    "two lengths that differ": (
        {"train_samples": 40, "global_batch_size": 4},
        ["train_iters 5, train_samples 40", "--train-samples null"],
    ),
    "less than a batch": (samples(7, global_batch_size=8), ["train_samples 7, global_batch_size 8"]),
    **{
        f"{length} in samples": ({f"{length}_samples": 4}, [f"{length}_samples 4, train_iters 5", "write --lr"])
        for length in ("lr_decay", "lr_warmup", "lr_wsd_decay")
    },
    **{
        f"{length} in iterations": (samples(40, **{f"{length}_iters": 4}), [f"{length}_iters 4, train_samples 40"])
        for length in ("lr_decay", "lr_warmup", "lr_wsd_decay")
    },
    "warm-up twice, in samples": (
        samples(40, lr_warmup_fraction=0.1, lr_warmup_samples=3),
        ["0.1", "lr_warmup_samples 3", "--lr-warmup-samples 0"],
    ),
    "warm-up too long, in samples": (
        samples(40, lr_warmup_samples=40),
        ["lr_warmup_samples 40", "lr_decay_samples 40 (derived from train_samples)"],
    ),
    "WSD without its last phase": ({"lr_decay_style": "WSD"}, ["no lr_wsd_decay_iters", "add --lr-wsd-decay-iters"]),
    "WSD without its last phase, in samples": (
        samples(40, lr_decay_style="WSD"),
        ["no lr_wsd_decay_samples", "add --lr-wsd-decay-samples"],
    ),
    "constant decay with a start": ({"start_weight_decay": 0.1}, ["weight_decay_incr_style constant, start_weight"]),
    "constant decay with an end": ({"end_weight_decay": 0.1}, ["end_weight_decay 0.1", "--weight-decay"]),
    "growing decay without an end": (
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1},
        ["start_weight_decay 0.1, end_weight_decay None"],
    ),
    "growing decay that falls": (
        {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.05},
        ["start_weight_decay 0.1, end_weight_decay 0.05"],
    ),
    "no data": ({"mock_data": False}, ["none", "--demo-data"]),
    "two sources": ({"demo_data": True}, ["mock_data and demo_data", "--no-demo-data"]),
    "three sources": ({"demo_data": True, "data_path": ("a",)}, ["data_path and mock_data and demo_data"]),
    "two blends": (
        {"mock_data": False, "data_path": ("0.3", "a", "0.7", "b"), "data_args_path": "f"},
        ["data_path and data_args_path"],
    ),
    "validation without training": (
        {"valid_data_path": ("a",)},
        ["valid_data_path, no train_data_path", "--train-data-path"],
    ),
    "split of parts": (
        {"mock_data": False, "train_data_path": ("a",), "split": "90,10"},
        ["split 90,10", "leave --split out"],
    ),
    "split of a file of parts": (
        {"mock_data": False, "per_split_data_args_path": "f", "split": "90,10"},
        ["split 90,10", "leave --split out"],
    ),
    "negative workers": ({"num_workers": -1}, ["num_workers", "at least 0"]),
    "tokenizer without file": ({"tokenizer_type": "HuggingFaceTokenizer"}, ["--tokenizer-model"]),
    "split words": ({"split": "most"}, ["'most'", "969,30,1"]),
    "split negative": ({"split": "1,-1,0"}, ["'1,-1,0'"]),
    "split zero": ({"split": "0,0,0"}, ["'0,0,0'"]),
    "split nan": ({"split": "nan,1,1"}, ["'nan,1,1'"]),
    "split long": ({"split": "1,1,1,1"}, ["one to three"]),
    "batch not by micro": ({"global_batch_size": 5}, ["global_batch_size 5", "micro_batch_size 2", "6"]),
    "batch not by cpu devices": (
        {"global_batch_size": 4, "num_cpu_devices": 4},
        ["global_batch_size 4", "data-parallel size 4", "2 * 4 = 8"],
    ),
    "save_interval alone": ({"save_interval": 10}, ["save_interval 10", "--save"]),
    "wandb name alone": ({"wandb_exp_name": "x"}, ["wandb_project"]),
    "profile range": (
        {"profile": True, "profile_step_start": 5, "profile_step_end": 5},
        ["profile_step_start 5", "profile_step_end 5"],
    ),
}


@pytest.mark.parametrize(("values", "parts"), BAD.values(), ids=BAD)
def test_impossible_combination_names_keys_numbers_and_a_way_out(values, parts):
    with pytest.raises(ConfigError) as error:
        validate(changed(**values))
    text = str(error.value)
    for part in ("where: --", "got: ", "expected: ", "fix: ", *parts):
        assert part in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "ffn_hidden_size")),
        *((name, 0) for name in ("num_query_groups", "kv_channels", "vocab_size", "make_vocab_size_divisible_by")),
        *((name, 0) for name in ("padded_vocab_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")),
        *((name, 0) for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")),
        *((name, 0) for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")),
        *((name, 0) for name in ("microbatch_group_size_per_virtual_pipeline_stage", "recompute_num_layers")),
        *((name, 0) for name in ("context_parallel_size", "expert_model_parallel_size", "micro_batch_size")),
        *((name, 0) for name in ("global_batch_size", "train_iters", "eval_interval", "exit_interval", "log_interval")),
        *((name, 0) for name in ("save_interval", "num_cpu_devices", "distributed_timeout_minutes", "lr_decay_iters")),
        *((name, 0.0) for name in ("loss_scale", "initial_loss_scale", "min_loss_scale")),
        *((name, 1e-30) for name in ("loss_scale", "initial_loss_scale", "min_loss_scale")),
        *((name, 0) for name in ("loss_scale_window", "hysteresis", "check_weight_hash_across_dp_replicas_interval")),
        *((name, 0) for name in ("train_samples", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples")),
        *((name, 1.0) for name in ("sgd_momentum", "lion_beta1", "lion_beta2", "muon_momentum")),
        *((name, -1.0) for name in ("decoupled_lr", "decoupled_min_lr", "start_weight_decay", "end_weight_decay")),
        *((name, -1.0) for name in ("muon_extra_scale_factor",)),
        *((name, -1) for name in ("eval_iters", "seed", "lr_warmup_samples", "lr_warmup_iters", "profile_step_start")),
        *(
            (name, value)
            for name in ("hidden_dropout", "attention_dropout", "label_smoothing")
            for value in (-0.1, 1.0)
        ),
        *((name, value) for name in ("adam_beta1", "adam_beta2") for value in (-0.1, 1.0)),
        *((name, value) for name in ("lr", "min_lr", "weight_decay", "clip_grad", "adam_eps") for value in (-1.0, NAN)),
        *((name, INF) for name in ("lr", "clip_grad", "norm_epsilon", "rotary_base", "init_method_std")),
        *((name, 0.0) for name in ("rotary_base", "rotary_percent", "norm_epsilon", "init_method_std")),
        ("rotary_percent", 1.1),
        ("seq_length", 2**63),
        ("rotary_seq_len_interpolation_factor", 0.0),
        ("rope_scaling_factor", 0.5),
        ("lr_warmup_fraction", 1.1),
        ("lr_warmup_fraction", 1.0),
        ("lr_warmup_fraction", -0.1),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"(?s){name} is out of range.*got: {value}"):
        validate(changed(**{name: value}))


@pytest.mark.parametrize(
    "values",
    [
        {},
        tp(8),
        tp(8, sequence_parallel=True),
        tp(4, group_query_attention=True, num_query_groups=2),
        tp(8, group_query_attention=True),
        tp(2, group_query_attention=True, num_query_groups=4),
        {"num_query_groups": 8},
        {"hidden_size": 60, "kv_channels": 16},
        {"sequence_parallel": True, "seq_length": 31},
        {"position_embedding_type": "none", "max_position_embeddings": None},
        {"position_embedding_type": "rope", "max_position_embeddings": None, "rotary_percent": 0.5},
        {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_factor": 32.0},
        cp(16),
        cp(4, attention_dropout=0.1, reset_attention_mask=True, window_size="4,0"),
        tp(4, context_parallel_size=4, sequence_parallel=True),
        # Without ranks to share a sequence its way does not matter, but the names and their number do.
        tp(8, cp_comm_type=("a2a", "all_gather")),
        cp(8, cp_comm_type=("a2a",)),
        tp(2, context_parallel_size=2, cp_comm_type=("a2a", "p2p"), group_query_attention=True, num_query_groups=4),
        cp(2, pipeline_schedule="1f1b-low-memory"),  # one stage runs 1f1b
        *(
            cp(2, pipeline_schedule="1f1b-low-memory", pipeline_model_parallel_size=2, cp_comm_type=(way,))
            for way in ("all_gather", "a2a")
        ),
        {"eval_iters": 0},
        {"clip_grad": 0.0},
        {"lr_warmup_iters": 4},
        {"lr_warmup_fraction": 0.5},
        {"train_samples": 43, "global_batch_size": 8},
        samples(40, lr_warmup_samples=39, lr_decay_style="WSD", lr_wsd_decay_samples=4),
        samples(40, lr_warmup_fraction=0.5, lr_decay_samples=20, global_batch_size=8),
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 1},
        {"lr_decay_style": "inverse-square-root", "optimizer": "muon"},
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.1},
        {"decoupled_lr": 1e-2, "decoupled_min_lr": 1e-3},
        {"decoupled_lr": 1e-2, "min_lr": 1e-4},
        {"split": "100"},
        {"split": "1,0,0"},
        {"save_interval": 10, "save": "somewhere"},
        {"profile_step_end": 3},
        {"lr": 0.0},
        {"pipeline_model_parallel_size": 2},
        tp(4, pipeline_model_parallel_size=2, padded_vocab_size=304),
        {"num_virtual_stages_per_pipeline_rank": 1},
        {"pipeline_model_parallel_size": 2, "num_layers": 3, "decoder_last_pipeline_num_layers": 1},
        {"pipeline_model_parallel_size": 2, "num_layers": 3, "account_for_loss_in_pipeline_split": True},
        {"pipeline_model_parallel_size": 2, "num_layers": 3, "pipeline_model_parallel_layout": "E|t|tt|L"},
        *(
            {"pipeline_model_parallel_size": 2, "pipeline_schedule": name}
            for name in ("1f1b", "1f1b-low-memory", "gpipe")
        ),
        {
            "pipeline_model_parallel_size": 2,
            "num_layers": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
            "pipeline_schedule": "interleaved",
            "microbatch_group_size_per_virtual_pipeline_stage": 3,
        },
        # Without chunks a group has no meaning, as in the reference.
        {"pipeline_model_parallel_size": 2, "microbatch_group_size_per_virtual_pipeline_stage": 1},
        {"fp16": True},
        {"fp16": True, "loss_scale": 128.0},
        {"bf16": True, "loss_scale": 128.0},
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "pipeline_schedule": "1f1b-low-memory"},  # one stage runs 1f1b
        {"use_distributed_optimizer": True, "pipeline_schedule": "1f1b-low-memory", "pipeline_model_parallel_size": 2},
        {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True},
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_num_layers": 1000},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp", "core_attn")},
        moe(moe_receive_bound_factor=1.5),  # a layout with ep 1 has the options of one with more
        moe(
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.01,
            moe_router_load_balancing_type="none",
        ),
    ],
)
def test_what_fits_passes(values):
    validate(changed(**values))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True),
        ({"bf16": True, "loss_scale": 128.0}, True),
        ({"fp16": True, "loss_scale": 128.0}, True),
        ({"fp16": True}, False),
        ({"check_for_nan_in_loss_and_grad": False}, False),
    ],
)
def test_steps_that_are_skipped_do_not_stop_a_run(values, expected):
    config = resolve(changed(**values))
    assert config.training.check_for_nan_in_loss_and_grad is expected
    assert resolve(config) == config


@pytest.mark.parametrize(
    ("text", "experts"), [(None, "1111"), ("2", "1010"), ("([0]+[1])*2", "0101"), ("[0]*1 + 3*[1]", "0111")]
)
def test_the_layers_with_experts_are_those_of_the_pattern(text, experts):
    model = changed(num_layers=4, num_experts=8, moe_layer_freq=text).model
    assert "".join(str(int(one)) for one in moe_layers(model)) == experts


def test_errors_of_the_config_are_usage_errors():
    with pytest.raises(UsageError):
        validate(changed(num_layers=0))


def test_data_parallel_size_is_what_the_degrees_leave():
    assert validate_for_devices(changed(**tp(2, global_batch_size=8)), 8) == 4
    assert validate_for_devices(changed(num_experts=4, expert_model_parallel_size=2, global_batch_size=16), 8) == 4
    assert validate_for_devices(changed(**tp(2, context_parallel_size=2, global_batch_size=4)), 8) == 2
    assert validate_for_devices(BASE, 1) == 1


@pytest.mark.parametrize("devices", [0, 3, 6, 2])
def test_devices_must_be_a_multiple_of_the_product_of_degrees(devices):
    with pytest.raises(ConfigError) as error:
        validate_for_devices(changed(**tp(4)), devices)
    for part in (f"{devices} devices", "tensor_model_parallel_size 4", "product 4", "--num-cpu-devices 4"):
        assert part in str(error.value)


def test_global_batch_must_be_a_multiple_of_micro_batch_times_replicas():
    with pytest.raises(ConfigError) as error:
        validate_for_devices(changed(**tp(2, global_batch_size=12)), 8)
    for part in ("global_batch_size 12", "micro_batch_size 2", "data-parallel size 4", "8 devices / 2", "2 * 4 = 8"):
        assert part in str(error.value)


def test_padded_vocab_size_is_the_next_multiple():
    assert padded_vocab_size(50257, 128, 1) == 50304
    assert padded_vocab_size(50257, 128, 8) == 51200
    assert padded_vocab_size(50304, 128, 1) == 50304
    assert padded_vocab_size(29, 8, 4) == 32


@pytest.mark.parametrize("stages", [1, 2, 4, 8, 128])
def test_padding_for_the_usual_numbers_of_stages_is_the_reference_s(stages):
    for ranks in (1, 2, 8):
        assert padded_vocab_size(50257, 128, ranks, stages) == padded_vocab_size(50257, 128, ranks)


@pytest.mark.parametrize(
    ("arguments", "rows"), [((50257, 128, 1, 3), 50304), ((50257, 128, 2, 3), 50688), ((257, 1, 2, 6), 264)]
)
def test_padding_is_a_multiple_of_the_devices_that_share_the_vocabulary(arguments, rows):
    assert padded_vocab_size(*arguments) == rows
    assert rows % (arguments[2] * arguments[3]) == 0
    assert rows % (arguments[1] * arguments[2]) == 0


def test_resolve_fills_everything_that_is_derived():
    config = resolve(changed(**tp(2)), vocab_size=257, data_parallel_size=3)
    assert config.model.ffn_hidden_size == 256
    assert config.model.num_query_groups == 8
    assert config.model.kv_channels == 8
    assert config.model.activation == "gelu_tanh"
    assert (config.model.vocab_size, config.model.padded_vocab_size) == (257, 512)
    assert config.parallel.pipeline_schedule == "1f1b"
    assert config.data.split == "969,30,1"
    assert config.optimizer.lr_decay_iters == 5
    assert config.training.global_batch_size == 6
    assert resolve(config) == config


def test_a_run_in_samples_has_the_whole_batches_in_them():
    config = resolve(changed(**samples(43, lr_warmup_samples=5)))
    assert (config.training.train_iters, config.optimizer.lr_decay_samples) == (None, 43)
    config = resolve(config, data_parallel_size=4)
    assert config.training.train_iters == 5
    assert (config.optimizer.lr_decay_iters, config.optimizer.lr_decay_samples) == (None, 43)
    assert resolve(config) == config
    validate(config)
    with pytest.raises(ConfigError, match="shorter than one global batch"):
        resolve(changed(**samples(43)), data_parallel_size=22)


@pytest.mark.parametrize(
    ("values", "schedule"),
    [
        ({}, "1f1b"),
        ({"pipeline_model_parallel_size": 2}, "1f1b"),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "gpipe"}, "gpipe"),
        ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 1}, "1f1b"),
        ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}, "interleaved"),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, "interleaved"),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2}, "1f1b"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t|tL"}, "interleaved"),
        ({"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Et|t|t|tL"}, "1f1b"),
    ],
)
def test_the_schedule_follows_from_the_number_of_chunks(values, schedule):
    config = resolve(changed(num_layers=4, **values))
    assert config.parallel.pipeline_schedule == schedule
    assert config.parallel.microbatch_group_size_per_virtual_pipeline_stage is None  # follows from the micro-batches
    assert resolve(config) == config
    validate(config)


def test_the_proposed_length_of_the_sequence_can_be_divided():
    shape = {"num_attention_heads": 12, "hidden_size": 96, "max_position_embeddings": 200}
    refused = 0
    for ranks, parts, both, length in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 6), (False, True), (1, 47, 96, 100)):
        values = tp(ranks, context_parallel_size=parts, sequence_parallel=both, **shape)
        try:
            validate(changed(**values, seq_length=length))
        except ConfigError as error:
            refused += 1
            proposed = int(re.search(r"--seq-length to (\d+)", str(error)).group(1))
            validate(changed(**values, seq_length=proposed))
            assert proposed % parts == 0
            assert proposed // parts % (ranks if both else 1) == 0
    assert refused > 40


SPLITS = {
    "one stage": {"num_layers": 3},
    "two stages": {"num_layers": 4, "pipeline_model_parallel_size": 2},
    "chunks": {"num_layers": 8, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "long last stage": {
        "num_layers": 7,
        "pipeline_model_parallel_size": 3,
        "decoder_last_pipeline_num_layers": 3,
    },
    "a place for the embedding": {
        "num_layers": 7,
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "account_for_embedding_in_pipeline_split": True,
    },
    "a layout with an empty chunk": {
        "num_layers": 7,
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": "E|t|t*4|ttL",
    },
}


@pytest.mark.parametrize("values", SPLITS.values(), ids=SPLITS)
def test_layers_at_one_place_are_those_of_the_pipelines_stacked_places(values):
    split = layer_split_of(changed(**values))
    layout = pipeline_layout(**dataclasses.asdict(split))
    columns = layout.places().reshape(-1, layout.layers_per_chunk).T
    assert layers_at_places(split) == tuple(tuple(row[row >= 0].tolist()) for row in columns)


@pytest.mark.parametrize(
    ("split", "types", "places"),
    [
        ("one stage", "a2a", "a2a a2a a2a"),
        ("one stage", "a2a p2p a2a", "a2a p2p a2a"),
        ("two stages", "a2a p2p a2a p2p", "a2a p2p"),
        ("chunks", "p2p a2a p2p a2a p2p a2a p2p a2a", "p2p a2a"),
        ("long last stage", "p2p a2a p2p a2a p2p a2a all_gather", "p2p a2a all_gather"),
        ("a layout with an empty chunk", "p2p p2p a2a p2p p2p p2p a2a", "p2p a2a p2p p2p"),
    ],
)
def test_ways_of_context_parallelism_by_place_of_a_chunk(split, types, places):
    config = changed(**cp(2, cp_comm_type=tuple(types.split()), **SPLITS[split]))
    validate(config)
    assert cp_comm_types(config) == tuple(places.split())


@pytest.mark.parametrize(
    ("split", "types", "found"),
    [
        ("two stages", "a2a p2p p2p a2a", "a2a for layer 1 and p2p for layer 3, both number 1"),
        ("chunks", "p2p a2a p2p a2a p2p a2a p2p p2p", "a2a for layer 2 and p2p for layer 8, both number 2"),
        ("long last stage", "p2p a2a p2p a2a a2a p2p p2p", "p2p for layer 1 and a2a for layer 5, both number 1"),
    ],
)
def test_layers_that_one_program_runs_communicate_in_one_way(split, types, found):
    values = {"cp_comm_type": tuple(types.split()), **SPLITS[split]}
    validate(changed(**values))
    with pytest.raises(ConfigError, match=found):
        validate(changed(**cp(2), **values))


@pytest.mark.parametrize(
    ("text", "window"),
    [
        (None, None),
        ("-1,-1", None),
        ("(-1,0)", None),
        ("0,0", 0),
        ("7,0", 7),
        ("(7,-1)", 7),
        (" ( 7 , 0 ) ", 7),
        ("30,0", 30),
        ("31,0", None),  # of 32 tokens the last one sees 31 before it
    ],
)
def test_a_window_is_the_number_of_tokens_before_a_token(text, window):
    config = changed(window_size=text)
    validate(config)
    assert attention_window(config.model) == window


def test_recomputation_fills_in_what_it_leaves_open():
    full = resolve(changed(recompute_granularity="full"))
    assert (full.training.recompute_method, full.training.recompute_num_layers) == ("uniform", 1)
    assert full.training.recompute_modules == ()
    selective = resolve(changed(recompute_granularity="selective"))
    assert selective.training.recompute_modules == ("core_attn",)
    assert (selective.training.recompute_method, selective.training.recompute_num_layers) == (None, None)
    for config in (full, selective):
        assert resolve(config) == config
        validate(config)


def test_resolve_leaves_open_what_it_cannot_know():
    config = resolve(BASE)
    assert config.model.vocab_size is None
    assert config.model.padded_vocab_size is None
    assert config.training.global_batch_size is None
    assert resolve(config, 257, 2) == resolve(BASE, 257, 2)


def test_resolve_keeps_what_is_set():
    values = {"ffn_hidden_size": 96, "kv_channels": 4, "activation": "geglu", "padded_vocab_size": 300}
    model = resolve(changed(vocab_size=299, **values), vocab_size=257).model
    assert dataclasses.asdict(model).items() >= {**values, "vocab_size": 299}.items()


def test_gated_layers_are_narrowed_only_for_swiglu():
    assert resolve(changed(hidden_size=4096, activation="swiglu")).model.ffn_hidden_size == 10880
    assert resolve(changed(hidden_size=4096, activation="geglu")).model.ffn_hidden_size == 16384


def test_grouped_query_attention_defaults_to_one_group():
    assert resolve(changed(group_query_attention=True)).model.num_query_groups == 1


def test_positions_default_to_the_sequence_where_no_table_is_learned():
    values = {"position_embedding_type": "rope", "max_position_embeddings": None}
    assert resolve(changed(**values)).model.max_position_embeddings == 32


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="tokenizer with 300 ids, vocab_size 257"):
        resolve(changed(vocab_size=257), vocab_size=300)
    with pytest.raises(ConfigError, match="padded_vocab_size 256, vocabulary of 300 ids"):
        resolve(changed(padded_vocab_size=256), vocab_size=300)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.model.num_layers = 3
