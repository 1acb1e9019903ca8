"""Families whose attention chooses its keys, for make_reference_models.py:

    python make_reference_models.py OUT --specs sparse_families.py

The index keeps 8 keys, 4 entries of four tokens each, or 2 blocks of eight, and sequences have up to 56 tokens, so that
most queries choose.
A choice has no gradient: that each tensor of an index matters is seen by changing it. A model is kept only if no choice is a near-tie, for which
transformers promises no order.
"""
import os
import re

import make_reference_models as base
from make_reference_models import BIG_EPS, rope

base.LEN_B = 56

KEPT = 8
# Between the worst key that is chosen and the best one that is not, relative to the deviation of the scores.
MIN_GAP = 1e-4

MOE = dict(vocab_size=64, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0, use_cache=True,
           hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_experts_per_tok=2,
           intermediate_size=32, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=16,
           v_head_dim=16, head_dim=16, n_shared_experts=1, moe_intermediate_size=32,
           first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5, index_topk=KEPT, index_head_dim=24,
           index_n_heads=8, rms_norm_eps=BIG_EPS)
PUT = dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
BITES = {"index": dict(index_topk=128), "keys kept": dict(index_topk=KEPT + 1), "eps": dict(rms_norm_eps=1e-5)}


# DeepSeek V4: entries that are chosen stand for four tokens, the others for eight.
CHOSEN, EVERY = 4, 4
V4_KINDS = ["sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse", "heavily_compressed"]

# MiniMax M3: blocks of keys, of which the query's own is chosen in any case.
BLOCKS, BLOCK = 2, 8
M3_KINDS = ["full_attention", "minimax_m3_sparse", "full_attention", "minimax_m3_sparse"]


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def as_published(tensors, generator, config):
    """The names of Hunyuan V4's checkpoint, which save_pretrained mixes up, and a tensor that is not read."""
    for name in list(tensors):
        published = name.replace(".hc_pre.hc_head.", ".hc_head.")
        published = re.sub(r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre.", published)
        if ".mlp." in name:
            published = published.replace(".linear_gate.", ".gate_proj.")
        tensors[published] = tensors.pop(name)
    hidden = config["hidden_size"]
    tensors["model.mtp_layers.0.eh_proj.weight"] = base.torch.randn(hidden, 2 * hidden, generator=generator)


def as_deepseek_publishes(tensors, generator, config):
    """The names of DeepSeek's checkpoint, of which save_pretrained changes some, and a tensor that is not read."""
    for name in list(tensors):
        published = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
        tensors[published.replace(".attn.norm.", ".attn.kv_norm.")] = tensors.pop(name)
    hidden = config["hidden_size"]
    tensors["mtp.0.e_proj.weight"] = base.torch.randn(hidden, hidden, generator=generator)


def further_tokens(tensors, generator, config):
    """A tensor that is not read."""
    hidden = config["hidden_size"]
    tensors["mtp.0.eh_proj.weight"] = base.torch.randn(hidden, 2 * hidden, generator=generator)


FAMILIES = {
    # As DeepSeek spells it: interleaved positions in the heads, halves in the index.
    "deepseek_v32": dict(
        cls="DeepseekV32ForCausalLM", style="v4",
        drop=["head_dim", "qk_head_dim", "output_router_logits", "layer_types", "mlp_layer_types", "mlp_bias"],
        put=dict(PUT, ep_size=1, num_nextn_predict_layers=1),
        config=dict(MOE, num_hidden_layers=2, n_routed_experts=4, n_group=2, topk_group=1,
                    rope_parameters=rope(10000, "yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=4.0,
                                         beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)),
        bites=dict(BITES, yarn=dict(rope_parameters=rope(10000)))),
    # GLM 5.2: some layers go by the keys of the one before.
    "glm_moe_dsa_shared": dict(
        cls="GlmMoeDsaForCausalLM", style="v5", drop=["qk_head_dim", "output_router_logits"],
        put=dict(PUT, indexer_rope_interleave=True, index_topk_freq=2, index_skip_topk_offset=1,
                 index_topk_pattern=None, index_share_for_mtp_iteration=True),
        config=dict(MOE, num_hidden_layers=4, n_routed_experts=3, n_group=1, topk_group=1, first_k_dense_replace=2,
                    indexer_types=["full", "shared", "full", "shared"], rope_parameters=rope(1e6)),
        bites=BITES),
    # Hunyuan V4: three residual streams, sinks, gates of attention's results, limits of experts.
    "hy_v4": dict(
        cls="HYV4ForCausalLM", style="v5", drop=["qk_head_dim", "output_router_logits"],
        f32=r"(^|[._])(fn|base|scale)$|\.sinks$|learnable_sink_param$",
        extra=as_published,
        put=dict(num_key_value_heads=2, enable_ihc=True, gated_mla=True, gating_type="elementwise", learnable_sink=True,
                 num_nextn_predict_layers=1),
        config=dict(without(MOE, "first_k_dense_replace"), num_hidden_layers=4, n_routed_experts=3, n_group=1,
                    topk_group=1, mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                    indexer_types=["full", "full", "shared", "full"], hc_mult=3, hc_magnitude=1.5, hc_eps=0.02,
                    swiglu_limit=0.7, rope_parameters=rope(1e4)),
        bites=dict(BITES, magnitude=dict(hc_magnitude=2.0), hc_eps=dict(hc_eps=1e-6),
                   limit=dict(swiglu_limit=1e4))),
    # DeepSeek V4: a window, entries of far tokens, some of them chosen, streams that are mixed, experts by token.
    "deepseek_v4": dict(
        cls="DeepseekV4ForCausalLM", style="v5", drop=["output_router_logits"], kept=CHOSEN,
        f32=r"(^|[._])(fn|base|scale|ape|position_bias)$|sinks?$|tid2eid$|gate\.bias$",
        extra=as_deepseek_publishes,
        put=dict(topk_method="noaux_tc"),
        config=dict(vocab_size=64, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
                    use_cache=True, hidden_size=32, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=1,
                    head_dim=32, partial_rotary_factor=0.25, q_lora_rank=32, o_groups=3, o_lora_rank=32,
                    sliding_window=8, layer_types=[kind + "_attention" for kind in V4_KINDS],
                    compress_rates=dict(compressed_sparse_attention=EVERY, heavily_compressed_attention=8),
                    index_n_heads=8, index_head_dim=16, index_topk=CHOSEN, moe_intermediate_size=32,
                    n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.5,
                    mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 3, swiglu_limit=0.7, hc_mult=4, hc_sinkhorn_iters=3,
                    hc_eps=0.02, rms_norm_eps=BIG_EPS, compress_rope_theta=4e4,
                    rope_parameters=rope(1e4, "yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=4.0,
                                         beta_slow=1.0)),
        bites=dict(index=dict(index_topk=128), kept=dict(index_topk=CHOSEN + 1), eps=dict(rms_norm_eps=1e-5),
                   window=dict(sliding_window=9), limit=dict(swiglu_limit=1e4), hc_eps=dict(hc_eps=1e-6),
                   iterations=dict(hc_sinkhorn_iters=2), scale=dict(routed_scaling_factor=1.0),
                   yarn=dict(rope_parameters=rope(1e4)), theta=dict(compress_rope_theta=1e4))),
    # MiniMax M3's text model: blocks of keys in some layers, limits of experts, shared experts and dense parts.
    "minimax_m3_vl_text": dict(
        cls="MiniMaxM3VLForCausalLM", style="v5", drop=["output_router_logits"], kept=BLOCKS,
        extra=further_tokens, gains=[(r"e_score_correction_bias", 0.5)],
        config=dict(vocab_size=64, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
                    use_cache=True, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                    head_dim=32, rotary_dim=16, intermediate_size=32, dense_intermediate_size=96,
                    shared_intermediate_size=64, num_local_experts=8, num_experts_per_tok=2, routed_scaling_factor=2.0,
                    mlp_layer_types=["dense"] + ["sparse"] * 3, layer_types=M3_KINDS, index_n_heads=2,
                    index_head_dim=32, index_block_size=BLOCK, index_topk_blocks=BLOCKS, index_local_blocks=1,
                    swiglu_alpha=1.702, swiglu_limit=1.0, rms_norm_eps=BIG_EPS,
                    rope_parameters=rope(1e4, partial_rotary_factor=0.5)),
        bites=dict(index=dict(index_topk_blocks=16), kept=dict(index_topk_blocks=BLOCKS + 1),
                   local=dict(index_local_blocks=2), block=dict(index_block_size=2 * BLOCK),
                   eps=dict(rms_norm_eps=1e-5), limit=dict(swiglu_limit=1e4), alpha=dict(swiglu_alpha=1.0),
                   scale=dict(routed_scaling_factor=1.0),
                   partial=dict(rope_parameters=rope(1e4, partial_rotary_factor=1.0)))),
}


def of_index(name):
    return ".indexer." in name


def of_streams(name):
    """The vectors of hyper-connections, for which the generator has no rule."""
    return "hc" in name and name.endswith(("base", "scale"))


def by_rule_of_streams(model, family, spec, seed):
    for name, tensor in model.named_parameters():
        if of_streams(name):
            drawn = base.torch.randn(tensor.shape, generator=base.generator(family, seed, name))
            drawn = 0.7 + 0.2 * drawn if name.endswith("scale") else 0.8 * drawn
            with base.torch.no_grad():
                tensor.copy_(drawn)


def tables_of_experts(model, family, seed):
    """Experts by token: each token's are distinct. The generator's own rules are for floats."""
    buffers = model.named_buffers
    for name, table in buffers():
        if name.endswith("tid2eid"):
            drawn = base.torch.rand(len(table), model.config.n_routed_experts, generator=base.generator(family, seed, name))
            table.copy_(drawn.argsort(dim=1)[:, :table.shape[1]])
    model.named_buffers = lambda **how: ((name, it) for name, it in buffers(**how) if not name.endswith("tid2eid"))


def whole_tables(write_weights):
    """Tables of experts are whole numbers in files."""
    def written(path, tensors, shards):
        whole = {name: it.long() if name.endswith("tid2eid") else it for name, it in tensors.items()}
        return write_weights(path, whole, shards)
    return written


def without_index(randomise):
    def randomised(model, family, spec, seed):
        named = model.named_parameters
        by_rule_of_streams(model, family, spec, seed)
        tables_of_experts(model, family, seed)
        model.named_parameters = lambda **how: ((name, it) for name, it in named(**how) if not of_streams(name))
        kinds = randomise(model, family, spec, seed)
        # From here on asked for gradients alone.
        model.named_parameters = lambda **how: ((name, it) for name, it in named(**how) if not of_index(name))
        return kinds
    return randomised


def smallest_gap(model, tokens, kept):
    """Over all layers and queries that choose, the distance between the last key chosen and the next."""
    found = []
    topk = base.torch.Tensor.topk

    def watched(self, k, *rest, **named):
        if self.ndim == 4 and self.shape[2] == len(tokens):
            for row in self[0].flatten(0, 1):
                # What is chosen in any case has no score.
                left = kept - int((row == float("inf")).sum())
                row = row[base.torch.isfinite(row)]
                if len(row) > left:
                    best = row.sort(descending=True).values
                    found.append(float((best[left - 1] - best[left]) / row.std()))
        if self.ndim == 3 and self.shape[1] == len(tokens) and self.shape[2] in (len(tokens), len(tokens) // EVERY):
            for row in self[0]:
                row = row[base.torch.isfinite(row) & (row > -1e30)]
                if len(row) > kept:
                    best = row.sort(descending=True).values
                    found.append(float((best[kept - 1] - best[kept]) / row.std()))
        return topk(self, k, *rest, **named)

    base.torch.Tensor.topk = watched
    try:
        base.logits_of(model, tokens)
    finally:
        base.torch.Tensor.topk = topk
    return min(found)


def with_choices_checked(make_one):
    def made(family, spec, out, seed):
        why, report = make_one(family, spec, out, seed)
        if why is not None:
            return why, report
        if not report["cached_decode_agrees"]:
            return "decoding with a cache gives other tokens", None
        path = os.path.join(out, family)
        model, _ = base.load(path, spec)
        want = base.load_file(os.path.join(path, "expected.safetensors"))
        both = base.torch.cat([want["tokens_a"], want["greedy"]])
        gap = min(smallest_gap(model, tokens.long(), spec.get("kept", KEPT)) for tokens in (want["tokens_b"], both))
        if gap < MIN_GAP:
            return f"keys are chosen by a difference of {gap:.1e}", None
        changes = []
        for name, tensor in model.named_parameters():
            if of_index(name):
                held = tensor.detach().clone()
                with base.torch.no_grad():
                    tensor.copy_(held.flip(0))
                changes.append(float((base.logits_of(model, want["tokens_b"]) - want["logits_b"]).abs().max()))
                with base.torch.no_grad():
                    tensor.copy_(held)
                if changes[-1] < 1e-2:
                    return f"{name} does not matter", None
        report.update(smallest_gap=gap, least_change_by_index=min(changes))
        return None, report
    return made


base.write_weights = whole_tables(base.write_weights)
base.randomise = without_index(base.randomise)
base.make_one = with_choices_checked(base.make_one)
