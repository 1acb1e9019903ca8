"""GPT-NeoX in Pythia's shape, for make_reference_models.py:

    python make_reference_models.py OUT --specs gpt_neox/reference.py

A quarter of each head is rotated.
"""
import make_reference_models as base
from make_reference_models import BIG_EPS, rope

base.LEN_B = 24

CONFIG = dict(vocab_size=64, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
              use_cache=True, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
              layer_norm_eps=BIG_EPS, rope_parameters=rope(1000, partial_rotary_factor=0.25))

FAMILIES = {
    "gpt_neox": dict(
        cls="GPTNeoXForCausalLM", style="v4", config=CONFIG,
        drop=["rope_theta", "rope_scaling", "partial_rotary_factor", "attention_bias", "is_decoder"],
        put=dict(rotary_emb_base=1000, rotary_pct=0.25),
        bites={"parallel": dict(use_parallel_residual=False), "eps": dict(layer_norm_eps=1e-6),
               "partial rotary": dict(rope_parameters=rope(1000, partial_rotary_factor=1.0)),
               "theta": dict(rope_parameters=rope(10000, partial_rotary_factor=0.25)),
               "gelu": dict(hidden_act="silu")}),
}
