"""Families with attention over a latent, for make_reference_models.py:

    python make_reference_models.py OUT --specs latent_families.py
"""
import make_reference_models as base
from make_reference_models import BIG_EPS, rope
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

base.LEN_B = 40

given = LongcatFlashExperts.__init__


def without_unread(self, config):
    """Experts that give what they read have no weights: here they have some that nothing reads, and no checkpoint has."""
    given(self, config)
    self.gate_up_proj = base.torch.nn.Parameter(self.gate_up_proj[:config.n_routed_experts].clone())


LongcatFlashExperts.__init__ = without_unread


def further_tokens(tensors, generator, config):
    """A tensor that is not read."""
    hidden = config["hidden_size"]
    tensors["model.mtp.layers.0.eh_proj.weight"] = base.torch.randn(hidden, 2 * hidden, generator=generator)


MLA = dict(vocab_size=64, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=True,
           hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32,
           kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, rms_norm_eps=BIG_EPS)


def scaled(beta):
    return rope(10000, "yarn", factor=8.0, original_max_position_embeddings=8, beta_fast=4.0, beta_slow=1.0,
                mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=beta, max_position_embeddings=64)


FAMILIES = {
    # Without experts. (Its class empties the row of the padding token when it loads a checkpoint.)
    "youtu": dict(
        cls="YoutuForCausalLM", style="v5", drop=["head_dim", "qk_head_dim", "mlp_bias"],
        config=dict(MLA, pad_token_id=None, intermediate_size=96, tie_word_embeddings=True, rope_parameters=rope(1.6e6)),
        bites={"eps": dict(rms_norm_eps=1e-5), "theta": dict(rope_parameters=rope(10000))}),
    # Queries grow with the position.
    "mistral4": dict(
        cls="Mistral4ForCausalLM", style="v5", load_as="mistral4", drop=["qk_head_dim", "output_router_logits"],
        config=dict(MLA, intermediate_size=64, n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1,
                    num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1, norm_topk_prob=True,
                    routed_scaling_factor=1.5, rope_parameters=scaled(0.5)),
        bites={"scaling": dict(routed_scaling_factor=1.0), "eps": dict(rms_norm_eps=1e-5),
               "queries by position": dict(rope_parameters=scaled(0.1)),
               "norm_topk_prob": dict(norm_topk_prob=False)}),
    # Two attentions in a layer, experts beside its first dense part and after its second, some of them without weights.
    "longcat_flash": dict(
        cls="LongcatFlashForCausalLM", style="v4", extra=further_tokens, gains=[(r"e_score_correction_bias", 0.2)],
        drop=["qk_head_dim", "output_router_logits", "num_key_value_heads", "num_hidden_layers"],
        put=dict(attention_method="MLA", zero_expert_type="identity", mla_scale_q_lora=True, mla_scale_kv_lora=True,
                 router_bias=False),
        config=dict(MLA, num_hidden_layers=4, num_layers=2, num_attention_heads=4, num_key_value_heads=4,
                    q_lora_rank=96, head_dim=16, ffn_hidden_size=96, expert_ffn_hidden_size=64, n_routed_experts=4,
                    zero_expert_num=3, moe_topk=3, routed_scaling_factor=1.5, rope_parameters=rope(1e6)),
        bites={"scaling": dict(routed_scaling_factor=1.0), "eps": dict(rms_norm_eps=1e-5),
               "experts taken": dict(moe_topk=2), "theta": dict(rope_parameters=rope(10000))}),
}
