"""Families with states or short convolutions in place of attention, or beside it, for make_reference_models.py.

    python make_reference_models.py OUT --specs hybrid_families.py
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import make_reference_models as base
from make_reference_models import BIG_EPS, rope
from more_families import DENSE, MOE

given = base.randomise


def randomise(model, family, spec, seed):
    """With gains of both signs in the last norm of tied models whose last norm has another name."""
    kinds = given(model, family, spec, seed)
    for name, t in model.named_parameters():
        if name in ("model.embedding_norm.weight", "model.final_layernorm.weight") and model.config.tie_word_embeddings:
            g = base.generator(family, seed, name + " sign")
            with base.torch.no_grad():
                t.mul_(base.torch.randint(0, 2, t.shape, generator=g) * 2.0 - 1.0)
    return kinds


base.randomise = randomise

MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8)

# As ibm-granite/granite-4.0-h-tiny spells it.
GRANITE_DROP = ["rope_parameters", "time_step_limit", "layers_block_type"]
GRANITE_PUT = dict(layer_types=["mamba", "attention"], normalization_function="rmsnorm", init_method="mup",
                   rope_theta=10000, rope_scaling=None)
GRANITE = dict(MAMBA, mamba_n_groups=1, mamba_proj_bias=False, embedding_multiplier=2.0, logits_scaling=0.8,
               residual_multiplier=0.7, attention_multiplier=0.109375, rms_norm_eps=BIG_EPS, tie_word_embeddings=True,
               layer_types=["linear_attention", "full_attention"])
GRANITE_BITES = {"eps": dict(rms_norm_eps=1e-5), **{k: {k: 1.0} for k in (
    "embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")}}

# As LiquidAI/LFM2-1.2B and LFM2-8B-A1B spell it.
LFM2 = dict(conv_L_cache=3, norm_eps=BIG_EPS, tie_word_embeddings=True, rope_parameters=rope(1e6),
            layer_types=["conv", "full_attention"])



def publish_kimi(tensors, _, cfg):
    """Dense parts have the name of the publisher."""
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f".block_sparse_moe.{part}.weight"
        for old in [old for old in tensors if old.endswith(name)]:
            tensors[old.replace(".block_sparse_moe.", ".mlp.")] = tensors.pop(old)


def publish_bailing(tensors, _, cfg):
    """Linear attention has the publisher's name for its last projection, which transformers reads as well."""
    for name in [name for name in tensors if name.endswith(".attention.f_proj.weight")]:
        layer = name.removesuffix("f_proj.weight")
        tensors[layer + "o_proj.weight"] = tensors.pop(layer + "dense.weight")


FAMILIES = {
    "granitemoehybrid": dict(
        cls="GraniteMoeHybridForCausalLM", style="v5", drop=GRANITE_DROP,
        put=dict(GRANITE_PUT, position_embedding_type="nope"),
        config=dict(MOE, **GRANITE, intermediate_size=32, num_local_experts=3, shared_intermediate_size=32,
                    mamba_conv_bias=True, position_embedding_type=None),
        bites=GRANITE_BITES),
    # As granite-4.0-h-micro, but with positions, as granite-4.0-micro has them.
    "granitemoehybrid_dense": dict(
        cls="GraniteMoeHybridForCausalLM", style="v5", drop=GRANITE_DROP,
        put=dict(GRANITE_PUT, position_embedding_type="rope"),
        config=dict(MOE, **GRANITE, intermediate_size=96, num_local_experts=0, shared_intermediate_size=96,
                    mamba_conv_bias=False, position_embedding_type="rope"),
        bites=dict(GRANITE_BITES, rope=dict(position_embedding_type=None))),
    "lfm2": dict(
        cls="Lfm2ForCausalLM", style="v4", drop=["intermediate_size", "layer_types"],
        put=dict(block_dim=64, block_ff_dim=96, block_mlp_init_scale=1.0, block_norm_eps=BIG_EPS, block_out_init_scale=1.0,
                 block_use_swiglu=True, block_use_xavier_init=True, conv_dim=64, conv_dim_out=64, conv_use_xavier_init=True,
                 eos_token_id=2, full_attn_idxs=[1], num_heads=4, use_pos_enc=True, tie_embedding=True,
                 theta=1000000.0),
        config=dict(DENSE, **LFM2, conv_bias=False, block_multiple_of=48, block_ffn_dim_multiplier=1.25,
                    block_auto_adjust_ff_dim=True),
        bites={"eps": dict(norm_eps=1e-5)}),
    "lfm2_moe": dict(
        cls="Lfm2MoeForCausalLM", style="v4", drop=["output_router_logits"],
        config=dict(MOE, **LFM2, intermediate_size=96, num_experts=3, moe_intermediate_size=32, num_dense_layers=1,
                    use_expert_bias=True, norm_topk_prob=True, routed_scaling_factor=1.5, conv_bias=False),
        bites={"eps": dict(norm_eps=1e-5), "scaling": dict(routed_scaling_factor=1.0)}),
    # As tiiuae/Falcon-H1-1.5B-Instruct spells it.
    "falcon_h1": dict(
        cls="FalconH1ForCausalLM", style="v4", drop=["time_step_limit", "layers_block_type"],
        put=dict(attn_layer_indices=None, attention_in_multiplier=0.75, mamba_use_mlp=True, mlp_expansion_factor=8,
                 time_step_floor=0.0001, time_step_max=0.1, time_step_min=0.001, time_step_rank="auto"),
        config=dict(DENSE, **{**MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 64, "intermediate_size": 64}, mamba_n_groups=2, mamba_conv_bias=True,
                    mamba_proj_bias=False, mamba_rms_norm=False, mamba_norm_before_gate=False, projectors_bias=False,
                    head_dim=16, rms_norm_eps=BIG_EPS, rope_parameters=rope(1e11), lm_head_multiplier=0.5,
                    embedding_multiplier=5.6, mlp_multipliers=[0.88, 0.29], key_multiplier=0.39,
                    attention_out_multiplier=0.94, attention_in_multiplier=0.75,
                    ssm_multipliers=[0.35, 0.25, 0.18, 0.5, 0.6], ssm_in_multiplier=1.25, ssm_out_multiplier=0.24),
        bites={"mlp": dict(mlp_multipliers=[1.0, 1.0]),
               "ssm": dict(ssm_multipliers=[1.0] * 5),
               **{k: {k: 1.0} for k in ("lm_head_multiplier", "embedding_multiplier", "key_multiplier",
                                        "attention_out_multiplier", "attention_in_multiplier", "ssm_in_multiplier",
                                        "ssm_out_multiplier")}}),
    # As moonshotai/Kimi-Linear-48B-A3B-Instruct spells it.
    "kimi_linear": dict(
        cls="KimiLinearForCausalLM", style="v5", extra=publish_kimi, f32=r"(A_log|dt_bias)$",
        drop=["layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim",
              "max_position_embeddings", "norm_topk_prob", "n_group", "num_local_experts", "num_experts_per_tok",
              "n_shared_experts", "output_router_logits", "qk_head_dim"],
        put=dict(model_max_length=256, moe_renormalize=True, num_expert_group=1, num_experts=3, num_experts_per_token=2,
                 num_shared_experts=1, first_k_dense_replace=1, moe_layer_freq=1, mla_use_nope=True,
                 moe_router_activation_func="sigmoid", use_grouped_topk=True, num_nextn_predict_layers=0, rope_theta=10000.0,
                 rope_scaling=None,
                 linear_attn_config=dict(full_attn_layers=[2], kda_layers=[1], head_dim=16, num_heads=4,
                                         short_conv_kernel_size=4)),
        config=dict({**MOE, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2},
                    kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
                    num_local_experts=3, n_shared_experts=1, moe_intermediate_size=32, n_group=1, topk_group=1,
                    routed_scaling_factor=2.446, norm_topk_prob=True, rms_norm_eps=BIG_EPS, linear_head_dim=16,
                    linear_num_heads=4, linear_conv_kernel_dim=4, layer_types=["linear_attention", "full_attention"],
                    mlp_layer_types=["dense", "sparse"]),
        bites={"eps": dict(rms_norm_eps=1e-5), "scaling": dict(routed_scaling_factor=1.0)}),
    # As inclusionAI/Ling-3.0-flash spells it; the width of its linear heads is that of no other.
    "bailing_hybrid": dict(
        cls="BailingHybridForCausalLM", style="v4", extra=publish_bailing, f32=r"(A_log|dt_bias|conv1d.weight)$",
        drop=["layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim",
              "model_max_length", "moe_renormalize", "num_expert_group", "num_experts_per_token", "num_local_experts",
              "n_shared_experts", "attention_bias", "pretraining_tp"],
        put=dict(architectures=["BailingMoeV3ForCausalLM"], max_position_embeddings=256, norm_topk_prob=True, n_group=2,
                 num_experts=6, num_experts_per_tok=2, num_shared_experts=1, head_dim=32, q_lora_rank=None,
                 rope_interleave=True, rope_theta=10000.0, rope_scaling=None, partial_rotary_factor=0.5, rotary_dim=16,
                 qk_head_dim=48, moe_shared_expert_intermediate_size=32, moe_router_enable_expert_bias=True,
                 num_nextn_predict_layers=0, no_kda_lora=True, use_kda_lora=False, group_norm_size=1, linear_silu=True,
                 gated_attention_proj_granularity_type="head_wise", num_kv_heads_for_linear_attn=0, use_qk_norm=True,
                 score_function="sigmoid", scoring_func="sigmoid", topk_method="noaux_tc", router_dtype="fp32",
                 seq_aux=True, embedding_dropout=0.0, output_dropout=0.0, max_window_layers=20, mtp_use_kda=False,
                 use_bias=False, use_qkv_bias=False, use_mla_nope=False, use_nGPT=False, up_proj_norm=False,
                 value_norm=False, scale_router_input=False, expert_swiglu_limit_list=None,
                 share_expert_swiglu_limit_list=None),
        config=dict({**MOE, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}, head_dim=32,
                    kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, num_local_experts=6,
                    n_shared_experts=1, moe_intermediate_size=32, n_group=2, topk_group=1, routed_scaling_factor=2.5,
                    norm_topk_prob=True, rms_norm_eps=BIG_EPS, layer_group_size=2, short_conv_kernel_size=4,
                    first_k_dense_replace=1, kda_safe_gate=True, kda_lower_bound=-5.0, num_mtp_layers=0,
                    rope_parameters=rope(10000)),
        bites={"eps": dict(rms_norm_eps=1e-5), "scaling": dict(routed_scaling_factor=1.0),
               "bounded fading": dict(kda_safe_gate=False), "bound": dict(kda_lower_bound=-1.0),
               "groups": dict(n_group=1), "theta": dict(rope_parameters=rope(100))}),
    # With the norm that larger ones do without, over two groups.
    "falcon_h1_norm": dict(
        cls="FalconH1ForCausalLM", style="v4", drop=["time_step_limit", "layers_block_type"],
        config=dict(DENSE, **{**MAMBA, "mamba_d_ssm": 128}, mamba_n_groups=2, mamba_conv_bias=True,
                    mamba_proj_bias=False, mamba_rms_norm=True, mamba_norm_before_gate=False, projectors_bias=False,
                    head_dim=16, rms_norm_eps=BIG_EPS, rope_parameters=rope(1e11), num_hidden_layers=1),
        bites={"eps": dict(rms_norm_eps=1e-5)}),
}
