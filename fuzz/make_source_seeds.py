"""Writes the seeds of gguf, pickle and quantization (needs numpy and gguf)."""
import json, struct, zipfile, sys
from pathlib import Path
import numpy as np, gguf
from gguf import GGMLQuantizationType as T
HERE = Path(__file__).parent
S, C = HERE.parent / "tests/data/sources", HERE / "corpus"
# pickle
z=zipfile.ZipFile(S/'pickle_bin/pytorch_model.bin')
(C/'pickle/dictionary.pkl').write_bytes(z.read([n for n in z.namelist() if n.endswith('data.pkl')][0]))
(C/'pickle/malicious.bin').write_bytes((S/'pickle_malicious/pytorch_model.bin').read_bytes())
(C/'pickle/malicious.pkl').write_bytes((S/'pickle_malicious/raw_pickle.bin').read_bytes())
# quantization
for d in sorted(S.iterdir()):
    c=d/'config.json'; m=d/'model.safetensors'
    if not (c.is_file() and m.is_file()) or d.name in('f16','f32','bf16_moe'): continue
    b=m.read_bytes(); n=struct.unpack('<Q',b[:8])[0]; h=json.loads(b[8:8+n]); h.pop('__metadata__',None)
    keep={k:[v['dtype'],v['shape']] for k,v in h.items() if '.layers.1.' not in k}
    q=json.loads(c.read_text()); q={k:q[k] for k in ('quantization_config','quantization') if k in q}
    if not q: continue
    (C/f'quantization/{d.name}.json').write_text(json.dumps({'config':q,'tensors':keep},separators=(',',':')))
# gguf
def model(path,arch,kinds,tok=None,experts=0):
    w=gguf.GGUFWriter(str(path),arch); rng=np.random.default_rng(1)
    H=256 if any(k in(T.Q4_K,T.Q6_K) for k in kinds) else 32
    w.add_context_length(64); w.add_embedding_length(H); w.add_block_count(1); w.add_feed_forward_length(H)
    w.add_head_count(2); w.add_head_count_kv(1); w.add_layer_norm_rms_eps(1e-5)
    if experts: w.add_expert_count(experts); w.add_expert_used_count(1); w.add_expert_feed_forward_length(32)
    if tok=="gpt2":
        w.add_tokenizer_model("gpt2"); w.add_tokenizer_pre("llama-bpe"); w.add_token_list(["a","b","ab","<s>"]); w.add_token_types([1,1,1,3]); w.add_token_merges(["a b"]); w.add_bos_token_id(3); w.add_add_bos_token(True); w.add_chat_template("{{ messages }}")
    else: w.add_tokenizer_model("no_vocab")
    def add(n,k,*shape):
        if k in (T.Q4_K,T.Q6_K):
            b,s=gguf.GGML_QUANT_SIZES[k]; data=rng.integers(0,256,(*shape[:-1],shape[-1]//b*s),dtype=np.uint8); w.add_tensor(n,data,raw_dtype=k)
        elif k==T.F32: w.add_tensor(n,rng.standard_normal(shape).astype(np.float32))
        else:
            data=gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32),k); w.add_tensor(n,data,raw_dtype=k)
    k=iter(kinds*4)
    add("token_embd.weight",next(k),4,H); add("blk.0.attn_q.weight",next(k),8,H); add("blk.0.attn_k.weight",next(k),4,H)
    add("blk.0.attn_q.bias",T.F32,8); add("blk.0.ffn_norm.weight",T.F32,H); add("rope_freqs.weight",T.F32,2)
    if experts: add("blk.0.ffn_down_exps.weight",next(k),experts,4,32)
    else: add("blk.0.ffn_down.weight",next(k),4,H)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
G=C/'gguf'
model(G/'small.gguf',"llama",[T.Q8_0,T.Q4_0,T.Q5_1,T.F16],"gpt2")
model(G/'k.gguf',"llama",[T.Q4_K,T.Q6_K])
model(G/'experts.gguf',"llama",[T.Q4_1,T.Q5_0],None,2)
model(G/'qwen.gguf',"qwen3moe",[T.BF16,T.Q8_0],None,2)
