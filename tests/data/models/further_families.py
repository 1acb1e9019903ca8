"""Dense families and families with experts that differ from the others in one thing or two, for make_reference_models.py:

    python make_reference_models.py OUT --specs further_families.py
"""
import make_reference_models as base
import torch
from make_reference_models import BIG_EPS, rope

base.LEN_B = 24

# Numbers of an activation, which the generator has no rule for.
given = base.randomise
SINGLE = {"alpha_p": 0.6, "alpha_n": -0.4, "beta": 0.5, "eps": -1e-6}


def randomise(model, family, spec, seed):
    odd = []
    for name, module in model.named_modules():
        for values in (module._parameters, module._buffers):
            odd += [(name, values, key, values.pop(key)) for key in SINGLE if key in values]
    kinds = given(model, family, spec, seed)
    for name, values, key, t in odd:
        g = base.generator(family, seed, f"{name} {key}")
        with torch.no_grad():
            # The others are the same in every checkpoint.
            spread = torch.rand(t.shape, generator=g) - 0.5 if key.startswith("alpha") else 0.0
            t.copy_(base.to_bf16_grid(SINGLE[key] + spread + torch.zeros(t.shape)))
        values[key] = t
        kinds["single"] = kinds.get("single", 0) + 1
    return kinds


base.randomise = randomise

V = 64
W = 8  # sliding window
BASE = dict(vocab_size=V, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=True,
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
DENSE = dict(BASE, intermediate_size=96)
MOE = dict(BASE, intermediate_size=32, num_experts_per_tok=2)
SWITCH = ["sliding_attention", "full_attention"]
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)

FAMILIES = {
    "ministral": dict(
        cls="MinistralForCausalLM", style="v4",
        config=dict(DENSE, intermediate_size=64, head_dim=16, sliding_window=W, layer_types=SWITCH, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(1e6)),
        bites={"window": dict(sliding_window=64), "eps": dict(rms_norm_eps=1e-6)}),
    "vaultgemma": dict(
        cls="VaultGemmaForCausalLM", style="v4", drop=["layer_types", "tie_word_embeddings"],
        config=dict(DENSE, head_dim=16, query_pre_attn_scalar=24, sliding_window=W, layer_types=SWITCH,
                    attn_logit_softcapping=6.0, final_logit_softcapping=5.0, tie_word_embeddings=True,
                    rms_norm_eps=4 * BIG_EPS, rope_parameters=rope(10000)),
        bites={"window": dict(sliding_window=64), "attention softcap": dict(attn_logit_softcapping=None),
               "final softcap": dict(final_logit_softcapping=None), "eps": dict(rms_norm_eps=1e-6)}),
    "helium": dict(
        cls="HeliumForCausalLM", style="v4",
        config=dict(DENSE, head_dim=16, attention_bias=True, mlp_bias=True, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(100000)),
        bites={"eps": dict(rms_norm_eps=1e-6)}),
    # The second layer knows no positions.
    "granite_swa": dict(
        cls="GraniteSWAForCausalLM", style="v5",
        config=dict(DENSE, intermediate_size=64, num_hidden_layers=3, sliding_window=W, embedding_multiplier=1.5, logits_scaling=0.8,
                    residual_multiplier=0.5, attention_multiplier=0.109375, tie_word_embeddings=False,
                    layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                    layer_rope_theta=[10000.0, 0, 500000.0], rms_norm_eps=BIG_EPS, rope_parameters=rope(10000)),
        bites={"window": dict(sliding_window=64), "theta": dict(layer_rope_theta=[10000.0, 0, 10000.0]),
               "no rope": dict(layer_rope_theta=[10000.0, 10000.0, 500000.0]), "eps": dict(rms_norm_eps=1e-6)}),
    "granitemoe_swa": dict(
        cls="GraniteMoeSWAForCausalLM", style="v5",
        config=dict(MOE, num_local_experts=3, shared_intermediate_size=32, sliding_window=W, embedding_multiplier=1.5,
                    logits_scaling=0.8, residual_multiplier=0.5, attention_multiplier=0.109375,
                    layer_types=["full_attention", "sliding_attention"], layer_rope_theta=[0, 10000.0],
                    rms_norm_eps=BIG_EPS, rope_parameters=rope(10000)),
        bites={"window": dict(sliding_window=64), "no rope": dict(layer_rope_theta=[10000.0, 10000.0]),
               "eps": dict(rms_norm_eps=1e-6)}),
    "flex_olmo": dict(
        cls="FlexOlmoForCausalLM", style="v4",
        config=dict(MOE, num_experts=3, norm_topk_prob=False, rms_norm_eps=BIG_EPS, rope_parameters=rope(500000)),
        bites={"eps": dict(rms_norm_eps=1e-6)}),
    "mellum": dict(
        cls="MellumForCausalLM", style="v5",
        config=dict(MOE, head_dim=16, num_experts=3, moe_intermediate_size=32, norm_topk_prob=True, sliding_window=W,
                    layer_types=SWITCH, mlp_layer_types=["sparse", "sparse"], rms_norm_eps=BIG_EPS,
                    rope_parameters=dict(full_attention=rope(500000, "yarn", factor=8.0, beta_fast=4.0, beta_slow=1.0,
                                                             original_max_position_embeddings=16, attention_factor=1.2),
                                         sliding_attention=rope(10000))),
        bites={"window": dict(sliding_window=64), "norm_topk_prob": dict(norm_topk_prob=False),
               "eps": dict(rms_norm_eps=1e-6),
               "yarn": dict(rope_parameters=dict(full_attention=rope(500000), sliding_attention=rope(10000)))}),
    "kolibri1": dict(
        cls="Kolibri1ForCausalLM", style="v5",
        config=dict({k: v for k, v in MOE.items() if k != "intermediate_size"}, head_dim=16, num_experts=3,
                    moe_intermediate_size=32, shared_expert_intermediate_size=32, norm_topk_prob=True,
                    sliding_window=W, layer_types=SWITCH, rms_norm_eps=BIG_EPS, rope_parameters=rope(1e6)),
        bites={"window": dict(sliding_window=64), "norm_topk_prob": dict(norm_topk_prob=False),
               "eps": dict(rms_norm_eps=1e-6)}),
    # Layers with windows have more heads; only half of the others' heads are rotated.
    "laguna": dict(
        cls="LagunaForCausalLM", style="v5",
        config=dict(MOE, intermediate_size=96, head_dim=16, num_experts=3, moe_intermediate_size=32,
                    shared_expert_intermediate_size=32, sliding_window=W, gating=True,
                    layer_types=["full_attention", "sliding_attention"], num_attention_heads_per_layer=[4, 6],
                    mlp_layer_types=["dense", "sparse"], moe_routed_scaling_factor=2.5, moe_router_logit_softcapping=2.0,
                    rms_norm_eps=BIG_EPS,
                    rope_parameters=dict(full_attention=rope(500000, "yarn", partial_rotary_factor=0.5, factor=8.0,
                                                             beta_fast=4.0, beta_slow=1.0, attention_factor=1.2,
                                                             original_max_position_embeddings=16),
                                         sliding_attention=rope(10000, partial_rotary_factor=1.0))),
        bites={"window": dict(sliding_window=64), "scaling": dict(moe_routed_scaling_factor=1.0),
               "softcap": dict(moe_router_logit_softcapping=0.0), "eps": dict(rms_norm_eps=1e-6)}),
    # The first layer is dense and rotated though it sees everything.
    "cohere2_moe": dict(
        cls="Cohere2MoeForCausalLM", style="v5",
        config=dict(MOE, hidden_size=32, num_hidden_layers=3, head_dim=16, num_experts=3, num_shared_experts=1,
                    shared_expert_combination_strategy="average", expert_selection_fn="sigmoid", norm_topk_prob=True,
                    prefix_dense_intermediate_size=64, prefix_dense_sliding_window_pattern=1,
                    layer_types=["full_attention", "sliding_attention", "full_attention"],
                    mlp_layer_types=["dense", "sparse", "sparse"], sliding_window=W, logit_scale=0.5,
                    layer_norm_eps=BIG_EPS, tie_word_embeddings=True, rope_parameters=rope(10000)),
        bites={"window": dict(sliding_window=64), "norm_topk_prob": dict(norm_topk_prob=False),
               "average": dict(shared_expert_combination_strategy="sum"), "eps": dict(layer_norm_eps=1e-6),
               "softmax": dict(expert_selection_fn="softmax"),
               "no rope": dict(prefix_dense_sliding_window_pattern=4)}),
    "apertus": dict(
        cls="ApertusForCausalLM", style="v4", gains=[(r"up_proj", 1.5)],
        config=dict(DENSE, rms_norm_eps=BIG_EPS, rope_parameters=rope(12e6, "llama3", **LLAMA3)),
        put=dict(post_norm=False, qk_norm=True),
        bites={"llama3 rope": dict(rope_parameters=rope(12e6)), "eps": dict(rms_norm_eps=1e-6)}),
    "olmo": dict(
        cls="OlmoForCausalLM", style="v4",
        config=dict(DENSE, clip_qkv=1.5, rope_parameters=rope(10000)),
        bites={"clip": dict(clip_qkv=None)}),
    "nanochat": dict(
        cls="NanoChatForCausalLM", style="v4",
        config=dict(DENSE, final_logit_softcapping=5.0, rms_norm_eps=BIG_EPS, rope_parameters=rope(10000)),
        bites={"softcap": dict(final_logit_softcapping=None), "eps": dict(rms_norm_eps=1e-6)}),
    "phimoe": dict(
        cls="PhimoeForCausalLM", style="v4",
        config=dict(MOE, num_local_experts=4, attention_bias=True, lm_head_bias=True, router_jitter_noise=0.05,
                    rms_norm_eps=BIG_EPS, sliding_window=None,
                    rope_parameters=rope(10000, "longrope", original_max_position_embeddings=64, short_mscale=1.2,
                                         long_mscale=1.2, short_factor=[1.0 + 0.1 * i for i in range(8)],
                                         long_factor=[1.0 + 0.8 * i for i in range(8)])),
        bites={"jitter": dict(router_jitter_noise=0.5), "eps": dict(rms_norm_eps=1e-6)}),
    "stablelm": dict(
        cls="StableLmForCausalLM", style="v4",
        config=dict(DENSE, use_qkv_bias=True, layer_norm_eps=BIG_EPS,
                    rope_parameters=rope(10000, partial_rotary_factor=0.5)),
        bites={"eps": dict(layer_norm_eps=1e-6)}),
    "phi": dict(
        cls="PhiForCausalLM", style="v4",
        config=dict(DENSE, num_key_value_heads=4, layer_norm_eps=BIG_EPS,
                    rope_parameters=rope(10000, partial_rotary_factor=0.5)),
        bites={"eps": dict(layer_norm_eps=1e-6)}),
    "axk1": dict(
        cls="AXK1ForCausalLM", style="v4", drop=base.MLA_DROP,
        put=dict(scoring_func="sigmoid", topk_method="noaux_tc", first_k_dense_replace=1, moe_layer_freq=1),
        config=dict(MOE, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32,
                    qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=4, n_shared_experts=1,
                    n_group=2, topk_group=1, moe_intermediate_size=32, mlp_layer_types=["dense", "sparse"],
                    norm_topk_prob=True, routed_scaling_factor=2.5, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(10000)),
        bites={"scaling": dict(routed_scaling_factor=1.0), "eps": dict(rms_norm_eps=1e-5)}),
}
