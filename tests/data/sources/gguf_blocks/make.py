"""Writes gguf_blocks, or with the word iq4 behind the folder gguf_iq4: every type of block that no other fixture has, with
the values that gguf-py reads."""
import json, hashlib, sys
from pathlib import Path
import numpy as np, gguf
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize, quantize
out=Path(sys.argv[1]); out.mkdir(exist_ok=True)
rng=np.random.default_rng(7)
H,I,V,HEADS,KV=256,256,32,2,1
HD=H//4  # 64
def weights(r,c): return (rng.standard_normal((r,c))*0.05).astype(np.float32)
def k_blocks(kind,rows,cols):
    block,size=gguf.GGML_QUANT_SIZES[kind]
    n=rows*cols//block
    b=rng.integers(0,256,(n,size),dtype=np.uint8)
    def scale(at,hi):
        b[:,at:at+2]=(rng.uniform(hi/4,hi,n)*rng.choice([1,-1],n)).astype(np.float16).reshape(n,1).view(np.uint8)
    if kind==T.Q2_K: scale(80,0.004); scale(82,0.004)
    if kind==T.Q3_K: scale(108,0.0008)
    if kind==T.Q5_K: scale(0,0.0001); scale(2,0.0005)
    if kind==T.IQ4_NL: scale(0,0.001)
    if kind==T.IQ4_XS: scale(0,0.00005)
    return b.reshape(rows,cols//block*size)
w=gguf.GGUFWriter(str(out/"model.gguf"),"llama")
w.add_context_length(512); w.add_embedding_length(H); w.add_block_count(1); w.add_feed_forward_length(I)
w.add_head_count(HEADS); w.add_head_count_kv(KV); w.add_layer_norm_rms_eps(1e-5); w.add_rope_freq_base(10000.0)
w.add_key_length(HD); w.add_value_length(HD); w.add_rope_dimension_count(HD); w.add_vocab_size(V); w.add_tokenizer_model("no_vocab")
expected={}; types={}; names={}
def back(a,heads):  # rows in transformers' order
    r=a.shape[0]; return a.reshape(heads,r//heads//2,2,*a.shape[1:]).swapaxes(1,2).reshape(a.shape)
def add(name,hf,kind,rows,cols,heads=0):
    if kind in (T.Q2_K,T.Q3_K,T.Q5_K,T.IQ4_NL,T.IQ4_XS): data=k_blocks(kind,rows,cols); 
    else: data=quantize(weights(rows,cols),kind)
    w.add_tensor(name,data,raw_dtype=kind)
    v=dequantize(data,kind).astype(np.float32).reshape(rows,cols)
    put(name,hf,back(v,heads) if heads else v,kind)
def put(name,hf,v,kind):
    assert np.isfinite(v).all()
    expected[hf]={"f32_sha256":hashlib.sha256(np.ascontiguousarray(v,dtype="<f4").tobytes()).hexdigest(),
      "first":[float(x) for x in v.reshape(-1)[:4]],"from":"cast" if kind in (T.F32,) else "decoded","shape":list(v.shape)}
    types[name]=kind.name; names[name]=hf
def norm(name,hf):
    v=(1+rng.standard_normal(H)*0.1).astype(np.float32); w.add_tensor(name,v); put(name,hf,v,T.F32)
L="model.layers.0."
# o_proj has 128 inputs: half a K block
EMBED,Q,K,VALUE,O,GATE,UP,DOWN=(T.Q4_1,T.Q5_0,T.Q5_1,T.Q4_1,T.BF16,T.Q2_K,T.Q3_K,T.Q5_K)
if sys.argv[2:]==["iq4"]: EMBED=Q=K=VALUE=O=T.IQ4_NL; GATE=UP=DOWN=T.IQ4_XS
add("token_embd.weight","model.embed_tokens.weight",EMBED,V,H)
add("blk.0.attn_q.weight",L+"self_attn.q_proj.weight",Q,HEADS*HD,H,HEADS)
add("blk.0.attn_k.weight",L+"self_attn.k_proj.weight",K,KV*HD,H,KV)
add("blk.0.attn_v.weight",L+"self_attn.v_proj.weight",VALUE,KV*HD,H)
add("blk.0.attn_output.weight",L+"self_attn.o_proj.weight",O,H,HEADS*HD)
add("blk.0.ffn_gate.weight",L+"mlp.gate_proj.weight",GATE,I,H)
add("blk.0.ffn_up.weight",L+"mlp.up_proj.weight",UP,I,H)
add("blk.0.ffn_down.weight",L+"mlp.down_proj.weight",DOWN,H,I)
norm("blk.0.attn_norm.weight",L+"input_layernorm.weight"); norm("blk.0.ffn_norm.weight",L+"post_attention_layernorm.weight")
norm("output_norm.weight","model.norm.weight")
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
json.dump({"bit_exact":True,"computed_by":f"gguf {__import__('importlib.metadata').metadata.version('gguf')} quants.dequantize, q/k rows back to transformers' order; blocks of Q2_K, Q3_K, Q5_K, IQ4_NL and IQ4_XS are random bits with small scales","consumed_without_output":[],"note":{"names":names,"types":types},"tensors":dict(sorted(expected.items()))},open(out/"expected.json","w"),indent=1,sort_keys=True)
