"""Further families for make_reference_models.py: smaller than the first ones, so that each folder stays below 200 KB.

    python make_reference_models.py OUT --specs more_families.py
"""
import make_reference_models as base
import transformers
from make_reference_models import BIG_EPS, mtp_layer, rope

base.LEN_B = 24

# Configurations of their own for what is computed as Llama computes it.
for name in ("IQuestCoder", "InternLM3"):
    config = getattr(transformers, name + "Config")
    own = type(name + "ForCausalLM", (transformers.LlamaForCausalLM,), dict(config_class=config))
    setattr(transformers, own.__name__, own)

class Step3p5ForCausalLM(transformers.models.step3p7.modeling_step3p7.Step3p7PreTrainedModel,
                         transformers.generation.GenerationMixin):
    """The text model of Step 3.7 by itself, as Step 3.5 is published; transformers has it within the whole alone."""
    config_class = transformers.models.step3p7.configuration_step3p7.Step3p7TextConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.models.step3p7.modeling_step3p7.Step3p7TextModel(config)
        self.lm_head = base.torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, **kw):
        kw = {key: value for key, value in kw.items() if key not in ("logits_to_keep", "labels", "return_dict")}
        out = self.model(input_ids=input_ids, **kw)
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values)


transformers.Step3p5ForCausalLM = Step3p5ForCausalLM

STEP = {"mlp.gate.weight": "moe.gate.weight", "mlp.gate.e_score_correction_bias": "moe.router_bias",
        "mlp.experts.down_proj": "moe.down_proj.weight", "mlp.shared_experts.": "share_expert."}


def publish_step(tensors, _, cfg):
    """Names of the publisher."""
    for name in list(tensors):
        t = tensors.pop(name)
        if name.endswith("mlp.experts.gate_up_proj"):
            layer = name.removesuffix("mlp.experts.gate_up_proj")
            gate, up = t.chunk(2, dim=1)
            tensors[layer + "moe.gate_proj.weight"] = gate
            tensors[layer + "moe.up_proj.weight"] = up
            continue
        for ours, theirs in STEP.items():
            name = name.replace(ours, theirs)
        tensors[name] = t


given_load = base.load


def load(path, spec):
    if spec["cls"] != "Step3p5ForCausalLM":
        return given_load(path, spec)
    raw = base.json.load(open(f"{path}/config.json"))
    config = Step3p5ForCausalLM.config_class(**{k: v for k, v in raw.items() if k not in ("model_type", "architectures")})
    config._attn_implementation = config._experts_implementation = "eager"
    model = Step3p5ForCausalLM(config).to(base.torch.float32).eval()
    state = {name: t.float() for name, t in base.load_file(f"{path}/model.safetensors").items()}
    for name in [name for name in state if name.endswith("moe.gate_proj.weight")]:
        layer = name.removesuffix("moe.gate_proj.weight")
        both = [state.pop(name), state.pop(layer + "moe.up_proj.weight")]
        state[layer + "mlp.experts.gate_up_proj"] = base.torch.cat(both, dim=1)
    for ours, theirs in STEP.items():
        state = {name.replace(theirs, ours): t for name, t in state.items()}
    model.load_state_dict(state, strict=True)
    return model, dict(missing_keys=[], mismatched_keys=[], unexpected_keys=[])


base.load = load

# What the generator has no rule for: factors of layers, and what Mamba lets through of a value.
given = base.randomise


def randomise(model, family, spec, seed):
    odd = {}
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            odd.update({(id(values), key): (values, key, values.pop(key)) for key in ("D", "layer_scalar", "scale", "per_expert_scale") if key in values})
    kinds = given(model, family, spec, seed)
    for index, (values, key, t) in enumerate(odd.values()):
        g = base.generator(family, seed, f"{key} {index}")
        with base.torch.no_grad():
            t.copy_(base.to_bf16_grid(base.torch.rand(t.shape, generator=g) + 0.5))
        values[key] = t
        kinds[key] = kinds.get(key, 0) + 1
    return kinds


base.randomise = randomise

V = 64
W = 8  # sliding window
BASE = dict(vocab_size=V, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=True,
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
DENSE = dict(BASE, intermediate_size=96)
MOE = dict(BASE, intermediate_size=64, num_experts_per_tok=2)
SWITCH = ["sliding_attention", "full_attention"]

FAMILIES = {
    "smollm3": dict(
        cls="SmolLM3ForCausalLM", style="v4", drop=["layer_types"],
        config=dict(DENSE, no_rope_layers=[1, 0], no_rope_layer_interval=4, use_sliding_window=True, sliding_window=W,
                    attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(2e6)),
        bites={"no rope": dict(no_rope_layers=[1, 1]), "window": dict(use_sliding_window=False, layer_types=None),
               "eps": dict(rms_norm_eps=1e-6)}),
    "exaone4": dict(
        cls="Exaone4ForCausalLM", style="v4",
        config=dict(DENSE, head_dim=16, sliding_window=W, sliding_window_pattern=4, layer_types=SWITCH,
                    rms_norm_eps=BIG_EPS, rope_parameters=rope(1e6, "llama3", factor=8.0, low_freq_factor=1.0,
                                                               high_freq_factor=4.0, original_max_position_embeddings=32)),
        bites={"window": dict(sliding_window=64), "llama3 rope": dict(rope_parameters=rope(1e6)),
               "eps": dict(rms_norm_eps=1e-6)}),
    "ernie4_5": dict(
        cls="Ernie4_5ForCausalLM", style="v4",
        config=dict(DENSE, head_dim=16, use_bias=True, tie_word_embeddings=True, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(500000)),
        bites={"eps": dict(rms_norm_eps=1e-5)}),
    "glm": dict(
        cls="GlmForCausalLM", style="v4",
        config=dict(DENSE, head_dim=16, attention_bias=True, partial_rotary_factor=0.5, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(10000, partial_rotary_factor=0.5)),
        bites={"partial rotary": dict(partial_rotary_factor=1.0, rope_parameters=rope(10000, partial_rotary_factor=1.0)),
               "eps": dict(rms_norm_eps=1e-6)}),
    "nemotron": dict(
        cls="NemotronForCausalLM", style="v4",
        config=dict(DENSE, head_dim=16, attention_bias=True, mlp_bias=True, partial_rotary_factor=0.5, norm_eps=BIG_EPS,
                    rope_parameters=rope(10000, partial_rotary_factor=0.5)),
        bites={"partial rotary": dict(partial_rotary_factor=1.0, rope_parameters=rope(10000, partial_rotary_factor=1.0)),
               "eps": dict(norm_eps=1e-5)}),
    "arcee": dict(
        cls="ArceeForCausalLM", style="v4",
        config=dict(DENSE, head_dim=16, attention_bias=True, mlp_bias=True, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(10000, "yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=4.0,
                                         beta_slow=1.0)),
        bites={"yarn": dict(rope_parameters=rope(10000)), "eps": dict(rms_norm_eps=1e-6)}),
    "cohere": dict(
        cls="CohereForCausalLM", style="v4",
        config=dict(DENSE, logit_scale=0.5, layer_norm_eps=BIG_EPS, attention_bias=True, tie_word_embeddings=True,
                    use_qk_norm=False, rope_parameters=rope(8e6)),
        bites={"logit_scale": dict(logit_scale=0.0625), "eps": dict(layer_norm_eps=1e-5)}),
    "olmo3": dict(
        cls="Olmo3ForCausalLM", style="v4",
        config=dict(DENSE, sliding_window=W, layer_types=SWITCH, rms_norm_eps=BIG_EPS,
                    rope_parameters=dict(full_attention=rope(500000, "yarn", factor=8.0, beta_fast=4.0, beta_slow=1.0,
                                                             original_max_position_embeddings=16,
                                                             attention_factor=1.2079),
                                         sliding_attention=rope(500000))),
        bites={"window": dict(sliding_window=64), "yarn": dict(rope_parameters=dict(full_attention=rope(500000),
                                                                                    sliding_attention=rope(500000))),
               "eps": dict(rms_norm_eps=1e-6)}),
    "qwen2_moe": dict(
        cls="Qwen2MoeForCausalLM", style="v4", drop=["layer_types"],
        config=dict(MOE, num_experts=3, moe_intermediate_size=32, shared_expert_intermediate_size=32,
                    norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[1], qkv_bias=True,
                    use_sliding_window=False, rope_parameters=rope(1e6)),
        bites={"norm_topk_prob": dict(norm_topk_prob=True)}),
    "olmoe": dict(
        cls="OlmoeForCausalLM", style="v4",
        config=dict(MOE, num_key_value_heads=4, intermediate_size=32, num_experts=3, norm_topk_prob=False,
                    rms_norm_eps=BIG_EPS, rope_parameters=rope(10000)),
        bites={"norm_topk_prob": dict(norm_topk_prob=True), "eps": dict(rms_norm_eps=1e-5)}),
    "deepseek_v2": dict(
        cls="DeepseekV2ForCausalLM", style="v4", drop=base.MLA_DROP,
        put=dict(scoring_func="softmax", moe_layer_freq=1, ep_size=1, seq_aux=True, aux_loss_alpha=0.001),
        config=dict(dict(MOE, num_attention_heads=2, num_key_value_heads=2), q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=32,
                    qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=4, n_shared_experts=1, n_group=2,
                    topk_group=1, topk_method="group_limited_greedy", moe_intermediate_size=32, first_k_dense_replace=1,
                    norm_topk_prob=False, routed_scaling_factor=16.0,
                    rope_parameters=rope(10000, "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32,
                                         beta_slow=1, mscale=0.707, mscale_all_dim=0.707)),
        gains=[(r"experts.*down_proj", 0.1)],
        bites={"yarn": dict(rope_parameters=rope(10000)), "scaling": dict(routed_scaling_factor=1.0),
               "expert groups": dict(topk_method="greedy")}),
    # Short enough that every key is read: the indexer chooses nothing, so its weights have no influence, and the check
    # of gradients has to pass over them.
    "glm_moe_dsa": dict(
        cls="GlmMoeDsaForCausalLM", style="v5", drop=["qk_head_dim", "output_router_logits"],
        put=dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1),
        config=dict(dict(MOE, num_attention_heads=2, num_key_value_heads=2), q_lora_rank=32, kv_lora_rank=32,
                    qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, head_dim=16, n_routed_experts=3,
                    n_shared_experts=1, n_group=1, topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1,
                    mlp_layer_types=["dense", "sparse"], norm_topk_prob=True, routed_scaling_factor=2.5,
                    index_topk=128, index_head_dim=32, index_n_heads=2, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(1e6)),
        bites={"scaling": dict(routed_scaling_factor=1.0), "eps": dict(rms_norm_eps=1e-5)}),
    "qwen3_5_moe": dict(
        cls="Qwen3_5MoeForCausalLM", style="v5", f32=r"linear_attn\.(A_log|norm\.weight)$",
        config=dict(dict(BASE, num_attention_heads=2, num_key_value_heads=1), head_dim=16, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32,
                    shared_expert_intermediate_size=32, linear_conv_kernel_dim=4, linear_key_head_dim=16,
                    linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                    layer_types=["linear_attention", "full_attention"],
                    rope_parameters=rope(1e7, partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True)),
        put=dict(full_attention_interval=4)),
    "dots1": dict(
        cls="Dots1ForCausalLM", style="v4", drop=["layer_types"],
        put=dict(scoring_func="sigmoid", topk_method="noaux_tc"),
        config=dict(MOE, head_dim=16, n_routed_experts=3, n_shared_experts=1, n_group=1, topk_group=1,
                    moe_intermediate_size=32, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
                    attention_bias=False, sliding_window=None, rope_parameters=rope(1e7)),
        bites={"scaling": dict(routed_scaling_factor=1.0), "norm_topk_prob": dict(norm_topk_prob=False)}),
    # As tencent/Hy3-preview spells it: the kinds of layers follow from first_k_dense_replace.
    "hy_v3": dict(
        cls="HYV3ForCausalLM", style="v5", drop=["mlp_layer_types", "num_local_experts"],
        put=dict(num_experts=3, expert_hidden_dim=32, first_k_dense_replace=1, num_nextn_predict_layers=0, qk_norm=True,
                 route_norm=True, moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True,
                 enable_lm_head_fp32=True, use_grouped_mm=False),
        config=dict(MOE, head_dim=16, num_experts=3, num_shared_experts=1, moe_intermediate_size=32,
                    router_scaling_factor=2.826, rms_norm_eps=BIG_EPS, rope_parameters=rope(11158840.0)),
        bites={"scaling": dict(router_scaling_factor=1.0), "eps": dict(rms_norm_eps=1e-5)}),
    # As upstage/Solar-Open-100B spells it.
    "solar_open": dict(
        cls="SolarOpenForCausalLM", style="v4",
        put=dict(first_k_dense_replace=0, use_qk_norm=False, intermediate_size=64, partial_rotary_factor=1.0),
        config=dict({k: v for k, v in MOE.items() if k != "intermediate_size"}, head_dim=16, n_routed_experts=3,
                    n_shared_experts=1, n_group=1, topk_group=1, moe_intermediate_size=32, norm_topk_prob=True,
                    routed_scaling_factor=2.5, attention_bias=True, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(1e6, "yarn", factor=2.0, original_max_position_embeddings=16)),
        bites={"scaling": dict(routed_scaling_factor=1.0), "yarn": dict(rope_parameters=rope(1e6)),
               "norm_topk_prob": dict(norm_topk_prob=False), "eps": dict(rms_norm_eps=1e-5)}),
    "granitemoe": dict(
        cls="GraniteMoeForCausalLM", style="v4",
        config=dict(MOE, intermediate_size=32, num_local_experts=3, embedding_multiplier=12.0,
                    logits_scaling=0.8, residual_multiplier=0.22, attention_multiplier=0.109375, rope_parameters=rope(10000)),
        bites={k: {k: 1.0} for k in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")}),
    "hunyuan_v1_dense": dict(
        cls="HunYuanDenseV1ForCausalLM", style="v4",
        config=dict(DENSE, head_dim=16, tie_word_embeddings=True,
                    rope_parameters=rope(10000, "dynamic", factor=1.0, alpha=1000.0)),
        bites={"alpha": dict(rope_parameters=rope(10000))}),
    "hunyuan_v1_moe": dict(
        cls="HunYuanMoEV1ForCausalLM", style="v4",
        config=dict({k: v for k, v in MOE.items() if k != "num_experts_per_tok"}, intermediate_size=32, head_dim=16,
                    num_experts=3, moe_topk=2, rope_parameters=rope(10000, "dynamic", factor=1.0, alpha=1000.0)),
        bites={"alpha": dict(rope_parameters=rope(10000))}),
    # As LGAI-EXAONE/K-EXAONE-236B-A23B spells it.
    "exaone_moe": dict(
        cls="ExaoneMoeForCausalLM", style="v4",
        drop=["mlp_layer_types", "num_local_experts", "output_router_logits"],
        put=dict(architectures=["ExaoneMoEForCausalLM"], first_k_dense_replace=1, is_moe_layer=[False, True],
                 scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=0, num_experts=3),
        config=dict(MOE, head_dim=16, num_experts=3, num_shared_experts=1, moe_intermediate_size=32, sliding_window=W,
                    sliding_window_pattern="LG", layer_types=SWITCH, first_k_dense_replace=1, norm_topk_prob=True,
                    routed_scaling_factor=2.5, n_group=1, topk_group=1, rms_norm_eps=BIG_EPS, rope_parameters=rope(1e6)),
        bites={"scaling": dict(routed_scaling_factor=1.0), "window": dict(sliding_window=64),
               "norm_topk_prob": dict(norm_topk_prob=False), "eps": dict(rms_norm_eps=1e-5)}),
    "cwm": dict(
        cls="CwmForCausalLM", style="v4", drop=["pretraining_tp"],
        config=dict(DENSE, head_dim=16, sliding_window=W, layer_types=["full_attention", "sliding_attention"],
                    rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(1e6, "llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                         original_max_position_embeddings=32)),
        bites={"window": dict(sliding_window=64), "llama3 rope": dict(rope_parameters=rope(1e6)),
               "eps": dict(rms_norm_eps=1e-5)}),
    "iquestcoder": dict(
        cls="IQuestCoderForCausalLM", style="v4",
        put=dict(auto_map={"AutoConfig": "configuration_iquestcoder.IQuestCoderConfig",
                           "AutoModelForCausalLM": "modeling_iquestcoder.IQuestCoderForCausalLM"},
                 clip_qkv=None, use_sliding_window=False, sliding_window=None, max_window_layers=0),
        config=dict(DENSE, head_dim=16, rms_norm_eps=BIG_EPS, rope_parameters=rope(500000)),
        bites={"eps": dict(rms_norm_eps=1e-5)}),
    "internlm3": dict(
        cls="InternLM3ForCausalLM", style="v4", drop=["attention_bias", "mlp_bias"],
        put=dict(bias=True, qkv_bias=True,
                 auto_map={"AutoConfig": "configuration_internlm3.InternLM3Config",
                           "AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"}),
        config=dict(DENSE, head_dim=16, attention_bias=True, mlp_bias=True, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(5e7, "dynamic", factor=6.0)),
        bites={"eps": dict(rms_norm_eps=1e-5)}),
    "gemma": dict(
        cls="GemmaForCausalLM", style="v4", drop=["use_bidirectional_attention", "tie_word_embeddings"],
        put=dict(hidden_act="gelu", hidden_activation=None),
        config=dict(DENSE, head_dim=16, num_key_value_heads=1, rms_norm_eps=BIG_EPS, tie_word_embeddings=True,
                    rope_parameters=rope(10000))),
    "hyperclovax": dict(
        cls="HyperCLOVAXForCausalLM", style="v4", put=dict(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2),
        config=dict(DENSE, head_dim=16, embedding_multiplier=10.0, logits_scaling=0.125, residual_multiplier=0.22,
                    attention_multiplier=0.109375, use_post_norm=True, rms_norm_eps=BIG_EPS, rope_parameters=rope(1e8)),
        gains=[(r"lm_head", 4.0)],
        bites=dict({k: {k: 1.0} for k in ("logits_scaling", "residual_multiplier", "attention_multiplier")},
                   embedding=dict(embedding_multiplier=0.5))),
    "granitemoeshared": dict(
        cls="GraniteMoeSharedForCausalLM", style="v4",
        config=dict(MOE, intermediate_size=32, num_local_experts=3, shared_intermediate_size=32,
                    embedding_multiplier=12.0, logits_scaling=0.8, residual_multiplier=0.22,
                    attention_multiplier=0.109375, rope_parameters=rope(10000)),
        bites={k: {k: 1.0} for k in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")}),
    "jais2": dict(
        cls="Jais2ForCausalLM", style="v4",
        config=dict(DENSE, head_dim=16, attention_bias=True, mlp_bias=True, layer_norm_eps=BIG_EPS,
                    rope_parameters=rope(500000)),
        bites={"eps": dict(layer_norm_eps=1e-5)}),
    # As arcee-ai/Trinity-Mini spells it.
    "afmoe": dict(
        cls="AfmoeForCausalLM", style="v4", drop=["num_local_experts", "output_router_logits", "attention_bias"],
        put=dict(n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1, route_norm=True,
                 score_func="sigmoid", use_grouped_mm=True, load_balance_coeff=0.001, num_experts=3,
                 auto_map={"AutoConfig": "configuration_afmoe.AfmoeConfig", "AutoModel": "modeling_afmoe.AfmoeModel",
                           "AutoModelForCausalLM": "modeling_afmoe.AfmoeForCausalLM"}),
        config=dict(MOE, head_dim=16, num_experts=3, num_shared_experts=1, num_dense_layers=1, moe_intermediate_size=32,
                    sliding_window=W, global_attn_every_n_layers=2, mup_enabled=True, route_scale=2.826,
                    rms_norm_eps=BIG_EPS, rope_parameters=rope(10000)),
        bites={"scale": dict(route_scale=1.0), "window": dict(sliding_window=64), "mup": dict(mup_enabled=False),
               "no rope": dict(layer_types=["sliding_attention"] * 2, sliding_window=64),
               "eps": dict(rms_norm_eps=1e-5)}),
    # As XiaomiMiMo/MiMo-V2-Flash spells it; kinds of layers, bases and shares are those that its class fills in.
    "mimo_v2_flash": dict(
        cls="MiMoV2FlashForCausalLM", style="v5",
        drop=["layer_types", "mlp_layer_types", "sliding_window", "num_local_experts", "output_router_logits"],
        put=dict(hybrid_layer_pattern=[0, 1], moe_layer_freq=[0, 1], rope_theta=5000000, swa_rope_theta=10000,
                 partial_rotary_factor=0.334, sliding_window=W - 1, sliding_window_size=W - 1, attention_chunk_size=W - 1,
                 swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=24, swa_v_head_dim=16,
                 add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, scoring_func="sigmoid",
                 topk_method="noaux_tc", n_shared_experts=None, layernorm_epsilon=BIG_EPS),
        config=dict(MOE, num_key_value_heads=1, head_dim=24, v_head_dim=16, n_routed_experts=3, moe_intermediate_size=32,
                    sliding_window=W, attention_value_scale=0.707, routed_scaling_factor=None, norm_topk_prob=True,
                    n_group=1, topk_group=1, rms_norm_eps=BIG_EPS),
        bites={"window": dict(sliding_window=64), "value scale": dict(attention_value_scale=1.0),
               "norm_topk_prob": dict(norm_topk_prob=False), "eps": dict(rms_norm_eps=1e-5)}),
    # The first layer sees its own chunk of 8, the second everything and no positions.
    "llama4_text": dict(
        cls="Llama4ForCausalLM", style="v4", drop=["layer_types", "no_rope_layers", "moe_layers", "output_router_logits"],
        gains=[(r"router.weight", 0.5), (r"experts.gate_up_proj", 1.5)],
        put=dict(no_rope_layer_interval=2, interleave_moe_layer_step=2),
        config=dict({k: v for k, v in MOE.items() if k != "num_experts_per_tok"}, head_dim=16, intermediate_size=32,
                    intermediate_size_mlp=96, num_experts_per_tok=1, num_local_experts=3, no_rope_layer_interval=2,
                    interleave_moe_layer_step=2, attention_chunk_size=W, use_qk_norm=True, floor_scale=4, attn_scale=0.3,
                    rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(500000, "llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                         original_max_position_embeddings=32)),
        bites={"chunk": dict(attention_chunk_size=64), "qk norm": dict(use_qk_norm=False),
               "temperature": dict(attn_temperature_tuning=False), "llama3 rope": dict(rope_parameters=rope(500000)),
               "no rope": dict(no_rope_layers=[1, 1], layer_types=["chunked_attention", "full_attention"]),
               "eps": dict(rms_norm_eps=1e-5)}),
    # The last layer sees everything: wider heads, whose values are their keys.
    "gemma4_text": dict(
        cls="Gemma4ForCausalLM", style="v5", drop=["per_layer_config"],
        put=dict(global_head_dim=32, num_global_key_value_heads=1),
        config=dict(DENSE, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
                    hidden_size_per_layer_input=0, sliding_window=W, layer_types=SWITCH, final_logit_softcapping=10.0,
                    tie_word_embeddings=True, rms_norm_eps=BIG_EPS,
                    rope_parameters=dict(full_attention=rope(1e6, "proportional", partial_rotary_factor=0.25),
                                         sliding_attention=rope(1e4))),
        bites={"window": dict(sliding_window=64), "softcap": dict(final_logit_softcapping=None),
               "proportional": dict(rope_parameters=dict(full_attention=rope(1e6), sliding_attention=rope(1e4)))}),
    # As nvidia/NVIDIA-Nemotron-3-Super-120B-A12B spells it: a letter for each layer.
    "nemotron_h": dict(
        cls="NemotronHForCausalLM", style="v5", gains=[(r"embeddings", 6.0), (r"experts.*up_proj", 1.5)],
        drop=["layer_types", "layers_block_type", "mtp_layers_block_type", "num_local_experts", "output_router_logits",
              "rope_parameters", "time_step_limit"],
        put=dict(hybrid_override_pattern="M*E-", num_hidden_layers=4, mtp_hybrid_override_pattern="*E", norm_eps=BIG_EPS,
                 rope_theta=10000, partial_rotary_factor=1.0, num_nextn_predict_layers=0,
                 auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig",
                           "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}),
        config=dict(MOE, num_hidden_layers=4, intermediate_size=64, head_dim=16,
                    hybrid_override_pattern="M*E-", mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=16,
                    conv_kernel=4, chunk_size=8, n_routed_experts=3, moe_intermediate_size=32,
                    moe_shared_expert_intermediate_size=32, moe_latent_size=32, n_shared_experts=1, norm_topk_prob=True,
                    routed_scaling_factor=2.5, layer_norm_epsilon=BIG_EPS),
        bites={"scaling": dict(routed_scaling_factor=1.0), "norm_topk_prob": dict(norm_topk_prob=False),
               "eps": dict(layer_norm_epsilon=1e-5)}),
    # As stepfun-ai/Step-3.5-Flash spells it.
    "step3p5": dict(
        cls="Step3p5ForCausalLM", style="v5", extra=publish_step, f32=r"moe.router_bias$",
        gains=[(r"experts.gate_up_proj", 2.5), (r"shared_experts.(gate|up)_proj", 2.0), (r"experts.*down_proj", 0.5)],
        drop=["per_layer_config", "rope_parameters", "mlp_layer_types", "num_sliding_attention_heads", "query_pre_attn_scalar",
              "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "mtp_layer_types", "mtp_mlp_layer_types",
              "num_nextn_predict_layers", "mlp_bias", "output_router_logits"],
        put=dict(model_type="step3p5", architectures=["Step3p5ForCausalLM"], num_attention_groups=2, moe_num_experts=3, moe_top_k=2,
                 moe_layers_enum="1", rope_theta=[5000000.0, 10000.0], partial_rotary_factors=[0.5, 1.0],
                 attention_other_setting=dict(attention_type="sliding_attention", num_attention_heads=6,
                                              num_attention_groups=2, head_dim=16),
                 rope_scaling=dict(rope_type="llama3", factor=2.0, original_max_position_embeddings=32, low_freq_factor=1.0,
                                   high_freq_factor=32.0),
                 yarn_only_types=["full_attention"], use_head_wise_attn_gate=True, use_moe=True, use_moe_router_bias=True,
                 need_fp32_gate=True, moe_router_activation="sigmoid", norm_expert_weight=True, att_impl_type="GQA",
                 auto_map={"AutoConfig": "configuration_step3p5.Step3p5Config",
                           "AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM"}),
        config=dict({k: v for k, v in MOE.items() if k != "num_experts_per_tok"}, head_dim=16, num_experts_per_tok=2,
                    n_routed_experts=3, moe_intermediate_size=32, share_expert_dim=32, sliding_window=W,
                    layer_types=["full_attention", "sliding_attention"], mlp_layer_types=["dense", "sparse"],
                    num_sliding_attention_heads=6, moe_router_scaling_factor=3.0, swiglu_limits=[0.0, 0.5],
                    swiglu_limits_shared=[0.0, 0.75], rms_norm_eps=BIG_EPS,
                    rope_parameters=dict(
                        full_attention=rope(5e6, "llama3", partial_rotary_factor=0.5, factor=2.0, low_freq_factor=1.0,
                                            high_freq_factor=32.0, original_max_position_embeddings=32),
                        sliding_attention=rope(1e4, partial_rotary_factor=1.0))),
        bites={"window": dict(sliding_window=64), "limits": dict(swiglu_limits=None),
               "shared limits": dict(swiglu_limits_shared=None), "scaling": dict(moe_router_scaling_factor=1.0),
               "eps": dict(rms_norm_eps=1e-5)}),
    # The same with experts beside the dense part.
    "gemma4_moe": dict(
        cls="Gemma4ForCausalLM", style="v5", drop=["per_layer_config"],
        put=dict(global_head_dim=32, num_global_key_value_heads=1),
        config=dict(DENSE, intermediate_size=32, head_dim=16, global_head_dim=32, num_global_key_value_heads=1,
                    attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=W, layer_types=SWITCH,
                    enable_moe_block=True, num_experts=3, top_k_experts=2, moe_intermediate_size=32,
                    final_logit_softcapping=10.0, tie_word_embeddings=True, rms_norm_eps=BIG_EPS,
                    rope_parameters=dict(full_attention=rope(1e6, "proportional", partial_rotary_factor=0.25),
                                         sliding_attention=rope(1e4))),
        bites={"window": dict(sliding_window=64), "softcap": dict(final_logit_softcapping=None)}),
}
