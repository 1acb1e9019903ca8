//! Files that are cut, lie, or promise more than they have.

mod fused;

use proptest::prelude::*;

use super::*;
use shardpack_quantize::dtype::Dtype;

fn put(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A file with these keys (as bytes of type and value) and tensors (name, dimensions as stored,
/// type, offset, bytes of data in all).
fn file(keys: &[(&str, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)], data: usize) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        put(&mut bytes, key);
        bytes.extend(value);
    }
    for (name, dims, kind, offset) in tensors {
        put(&mut bytes, name);
        bytes.extend((dims.len() as u32).to_le_bytes());
        bytes.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(32) + data, 0);
    bytes
}

fn text(value: &str) -> Vec<u8> {
    let mut bytes = 8_u32.to_le_bytes().to_vec();
    put(&mut bytes, value);
    bytes
}

fn count(value: u32) -> Vec<u8> {
    [4_u32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn decimal(value: f32) -> Vec<u8> {
    [6_u32.to_le_bytes(), value.to_le_bytes()].concat()
}

/// Keys of a small llama.
fn keys(architecture: &str, more: &[(&'static str, Vec<u8>)]) -> Vec<(String, Vec<u8>)> {
    let own = |key: &str| format!("{architecture}.{key}");
    let mut keys = vec![
        ("general.architecture".to_owned(), text(architecture)),
        (own("block_count"), count(1)),
        (own("context_length"), count(128)),
        (own("embedding_length"), count(64)),
        (own("feed_forward_length"), count(96)),
        (own("attention.head_count"), count(2)),
        (own("attention.layer_norm_rms_epsilon"), decimal(1e-5)),
    ];
    keys.extend(more.iter().map(|(key, value)| (own(key), value.clone())));
    keys
}

fn header(keys: &[(String, Vec<u8>)], tensors: &[(&str, &[u64], u32, u64)], data: usize) -> Header {
    let keys: Vec<(&str, Vec<u8>)> =
        keys.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    parse(&file(&keys, tensors, data)).unwrap()
}

const EMBEDDING: (&str, &[u64], u32, u64) = ("token_embd.weight", &[64, 8], 0, 0);

fn config_of(header: &Header, frequencies: Option<&[f32]>) -> Result<serde_json::Value, GgufError> {
    let model = Model::new(header)?;
    let all = frequencies.map(<[f32]>::to_vec);
    let frequencies = config::Frequencies { all, ..config::Frequencies::default() };
    config::config(&model, &model.parts(&header.tensors)?, &frequencies)
}

#[test]
fn keys_become_a_configuration() {
    let more = [("rope.freq_base", decimal(500_000.0)), ("attention.head_count_kv", count(1))];
    let header = header(&keys("llama", &more), &[EMBEDDING], 2048);
    let config = config_of(&header, None).unwrap();
    let expected = serde_json::json!({
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 8,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        "hidden_act": "silu", "rope_theta": 500_000.0, "intermediate_size": 96,
        "attention_bias": false, "mlp_bias": false, "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    });
    assert_eq!(config, expected);
}

#[track_caller]
fn check_key_refused(key: &'static str, value: Vec<u8>, expected: &str) {
    let header = header(&keys("llama", &[(key, value)]), &[EMBEDDING], 2048);
    let error = config_of(&header, None).unwrap_err().to_string();
    assert!(error.contains(expected) && error.contains(key), "{error}");
}

#[test]
fn keys_that_are_not_understood_are_refused_by_name() {
    // Understood, but of other architectures.
    check_key_refused("attn_logit_softcapping", decimal(50.0), "is 50 and not understood");
    check_key_refused("attention.clamp_kqv", decimal(8.0), "is 8 and not understood");
    check_key_refused("attention.sliding_window", count(64), "is 64, which is not read");
    check_key_refused("attention.value_length", count(16), "is 16, expected 32");
    check_key_refused("rope.dimension_count", count(16), "is 16, expected 32");
    check_key_refused("rope.scaling.type", text("longrope"), "is \"longrope\", which is not read");
    check_key_refused("attention.head_count_kv", text("two"), "is \"two\", expected one count");
    let other = header(&keys("bert", &[]), &[EMBEDDING], 2048);
    let error = Model::new(&other).unwrap_err().to_string();
    assert!(error.contains("\"bert\"") && error.contains("safetensors"), "{error}");
}

/// The factors that llama.cpp's converter writes for Llama 3, computed in 32 bits as it does.
fn llama3_factors(theta: f32, head: usize, whole: f32) -> Vec<f32> {
    let factor = |index: usize| {
        let frequency = 1.0 / theta.powf(2.0 * index as f32 / head as f32);
        let wave = 2.0 * std::f32::consts::PI / frequency;
        if wave < 2048.0 {
            1.0
        } else if wave > 8192.0 {
            whole
        } else {
            let smooth = (8192.0 / wave - 1.0) / 3.0;
            1.0 / ((1.0 - smooth) / whole + smooth)
        }
    };
    (0..head / 2).map(factor).collect()
}

#[test]
fn factors_of_frequencies_are_recognised_or_refused() {
    let more = [("rope.freq_base", decimal(500_000.0))];
    let header = header(&keys("llama", &more), &[EMBEDDING], 2048);
    for whole in [8.0, 32.0] {
        let factors = llama3_factors(500_000.0, 32, whole);
        let config = config_of(&header, Some(&factors)).unwrap();
        assert_eq!(config["rope_scaling"]["rope_type"], "llama3");
        assert_eq!(config["rope_scaling"]["factor"], f64::from(whole));
    }
    let mut other = llama3_factors(500_000.0, 32, 8.0);
    other[9] *= 1.01;
    let error = config_of(&header, Some(&other)).unwrap_err().to_string();
    assert!(error.contains("rope_freqs.weight") && error.contains("config.json"), "{error}");
    let none = config_of(&header, Some(&[1.0; 16])).unwrap();
    assert!(none.get("rope_scaling").is_none());
}

#[test]
fn tensors_get_their_names_back() {
    let tensors: [(&str, &[u64], u32, u64); 7] = [
        EMBEDDING,
        ("blk.0.attn_q.weight", &[64, 64], 0, 2048),
        ("blk.0.attn_k.bias", &[64], 0, 18432),
        ("blk.0.ffn_gate_inp.weight", &[64, 2], 0, 18688),
        ("blk.0.ffn_down_exps.weight", &[32, 64, 2], 8, 19200),
        ("rope_freqs.weight", &[16], 0, 23552),
        ("blk.0.unheard_of.weight", &[1], 0, 23616),
    ];
    let header = header(&keys("llama", &[]), &tensors, 23620);
    let parts = Model::new(&header).unwrap().parts(&header.tensors).unwrap();
    let found: Vec<_> = parts.iter().map(|part| (part.name.as_deref(), part.rows)).collect();
    let turned = Rows::Rotary { head: 32 };
    let expert = |index| format!("model.layers.0.block_sparse_moe.experts.{index}.w2.weight");
    assert_eq!(
        found,
        [
            (Some("model.embed_tokens.weight"), Rows::Same),
            (Some("model.layers.0.self_attn.q_proj.weight"), turned),
            (Some("model.layers.0.self_attn.k_proj.bias"), turned),
            (Some("model.layers.0.block_sparse_moe.gate.weight"), Rows::Same),
            (Some(expert(0).as_str()), Rows::Same),
            (Some(expert(1).as_str()), Rows::Same),
            (None, Rows::Same),
            (Some("blk.0.unheard_of.weight"), Rows::Same),
        ]
    );
    let second = parts[5].info();
    assert_eq!((second.dtype, second.shape.as_slice()), (Dtype::U8, [64, 34].as_slice()));
    assert_eq!(second.offset - parts[4].offset, 64 * 34);
}

#[test]
fn gains_with_one_added_are_told_by_their_names() {
    let tensors: [(&str, &[u64], u32, u64); 4] = [
        EMBEDDING,
        ("blk.0.ffn_norm.weight", &[64], 0, 2048),
        ("blk.0.attn_q.weight", &[64, 64], 0, 2304),
        ("output_norm.weight", &[64], 0, 18688),
    ];
    let header = header(&keys("gemma2", &[]), &tensors, 18944);
    let parts = Model::new(&header).unwrap().parts(&header.tensors).unwrap();
    let found: Vec<_> = parts.iter().map(|part| part.rows).collect();
    assert_eq!(found, [Rows::Same, Rows::OneMore, Rows::Same, Rows::OneMore]);
    let name = parts[1].name.as_deref();
    assert_eq!(name, Some("model.layers.0.pre_feedforward_layernorm.weight"));
    let quantized = self::header(&keys("gemma2", &[]), &[("output_norm.weight", &[64], 2, 0)], 36);
    let error = Model::new(&quantized).unwrap().parts(&quantized.tensors).unwrap_err().to_string();
    assert!(error.contains("output_norm.weight") && error.contains("Q4_0"), "{error}");
}

#[test]
fn factors_of_both_lengths_come_together_and_fit() {
    let more = [
        ("rope.dimension_count", count(24)),
        ("rope.scaling.original_context_length", count(64)),
        ("rope.scaling.attn_factor", decimal(1.080_123_5)),
    ];
    let header = header(&keys("phi3", &more), &[EMBEDDING], 2048);
    let config = |long: Option<usize>, short: Option<usize>| {
        let model = Model::new(&header).unwrap();
        let factors = |count: Option<usize>| count.map(|count| vec![1.1; count]);
        let (all, long, short) = (None, factors(long), factors(short));
        let frequencies = config::Frequencies { all, long, short };
        let parts = model.parts(&header.tensors).unwrap();
        config::config(&model, &parts, &frequencies).map_err(|error| error.to_string())
    };
    let found = config(Some(12), Some(12)).unwrap();
    assert_eq!(found["rope_scaling"]["long_factor"][11], 1.1);
    assert_eq!(found["partial_rotary_factor"], 0.75);
    assert!(config(Some(12), None).unwrap_err().contains("rope_factors_short.weight"));
    assert!(config(Some(12), Some(16)).unwrap_err().contains("12 factors"));
    assert!(config(None, None).unwrap().get("rope_scaling").is_none());
}

#[track_caller]
fn check_refused(bytes: &[u8], expected: &str) {
    let error = parse(bytes).unwrap_err().to_string();
    assert!(error.contains(expected), "{error:?} does not contain {expected:?}");
}

#[test]
fn impossible_tensors_are_refused_by_name() {
    let one = |tensor, data| file(&[], &[tensor], data);
    check_refused(&one(("x", &[8], 0, 0), 31), "\"x\": it does not lie inside the file");
    check_refused(&one(("x", &[8], 0, u64::MAX), 32), "it does not lie inside the file");
    check_refused(&one(("x", &[1 << 40, 1 << 40], 0, 0), 0), "too many elements");
    check_refused(&one(("x", &[0], 0, 0), 0), "it is empty");
    check_refused(&one(("x", &[31], 2, 0), 64), "rows of 31 are not whole blocks of Q4_0");
    check_refused(&one(("x", &[32], 15, 0), 64), "it is stored as Q8_K");
    check_refused(&one(("x", &[32], 99, 0), 64), "unknown ggml type 99");
    check_refused(&one(("x", &[1; 5], 0, 0), 64), "5 dimensions");
    let two = [("x", &[8_u64][..], 0, 0), ("y", &[8_u64][..], 0, 16)];
    check_refused(&file(&[], &two, 64), "\"y\": it shares its bytes");
    let twice = [("a", count(1)), ("a", count(1))];
    check_refused(&file(&twice, &[], 0), "\"a\" is there twice");
    check_refused(&file(&[("general.alignment", count(3))], &[], 0), "an alignment of 3");
    let array = [9_u32.to_le_bytes(), 0_u32.to_le_bytes()].concat();
    let long = [array, u64::MAX.to_le_bytes().to_vec()].concat();
    check_refused(&file(&[("a", long)], &[], 0), "bytes, ");
}

#[test]
fn a_beginning_asks_for_more_until_it_is_whole() {
    let whole = file(&[("a", text("long enough"))], &[EMBEDDING], 2048);
    let size = whole.len() as u64;
    let header = parse(&whole).unwrap();
    let end = whole.len() - 2048;
    for len in 0..=end {
        match parse_start(&whole[..len], size) {
            Ok(found) => assert_eq!(found, header, "{len}"),
            Err(Ok(needed)) => assert!(needed > len as u64 && needed <= size, "{len}: {needed}"),
            Err(Err(error)) => panic!("{len}: {error}"),
        }
    }
    assert!(parse_start(&whole[..end], size).is_ok());
    assert!(parse(&whole[..end]).is_err(), "its tensor is missing");
}

proptest! {
    #[test]
    fn damaged_headers_give_errors_or_tensors_inside(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = file(&[("a", text("b")), ("c", count(7))], &[EMBEDDING], 2048);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(header) = parse(&bytes) {
            for tensor in header.tensors {
                prop_assert!(tensor.offset + tensor.size <= bytes.len() as u64);
            }
        }
    }
}

#[test]
fn absent_keys_have_the_values_that_llama_cpp_takes() {
    let config = |architecture: &str, more: &[(&'static str, Vec<u8>)]| {
        config_of(&header(&keys(architecture, more), &[EMBEDDING], 2048), None).unwrap()
    };
    let linear = serde_json::json!({"rope_type": "linear", "factor": 4.0});
    assert_eq!(config("llama", &[])["rope_theta"], 10_000.0);
    // A factor without a type stretches linearly; of its two names the newer counts.
    let factor = ("rope.scaling.factor", decimal(4.0));
    let older = ("rope.scale_linear", decimal(4.0));
    for more in [&[factor.clone()][..], &[older], &[factor, ("rope.scale_linear", decimal(2.0))]] {
        assert_eq!(config("llama", more)["rope_scaling"], linear);
    }
    for nothing in [0.0, 1.0] {
        let config = config("llama", &[("rope.scaling.factor", decimal(nothing))]);
        assert!(config.get("rope_scaling").is_none(), "{nothing}");
    }
    let none = [("rope.scaling.type", text("none")), ("rope.scaling.factor", decimal(4.0))];
    assert!(config("llama", &none).get("rope_scaling").is_none());
    let yarn = [("rope.scaling.type", text("yarn")), ("rope.scaling.factor", decimal(4.0))];
    assert_eq!(config("llama", &yarn)["rope_scaling"]["original_max_position_embeddings"], 128);
    let experts = [("expert_count", count(4)), ("expert_used_count", count(2))];
    assert_eq!(config("qwen3moe", &experts)["moe_intermediate_size"], 48);
    let granite =
        config("granite", &[("logit_scale", decimal(8.0)), ("residual_scale", decimal(0.0))]);
    assert_eq!(granite["attention_multiplier"], 1.0 / f64::from(32_f32).sqrt());
    assert!(granite.get("residual_multiplier").is_none());
    let stated = config("granite", &[("attention.scale", decimal(0.5))]);
    assert_eq!(stated["attention_multiplier"], 0.5);
}

fn texts(values: &[&str]) -> Vec<u8> {
    let mut bytes = [9_u32.to_le_bytes(), 8_u32.to_le_bytes()].concat();
    bytes.extend((values.len() as u64).to_le_bytes());
    for value in values {
        put(&mut bytes, value);
    }
    bytes
}

fn integers(values: &[i32]) -> Vec<u8> {
    let mut bytes = [9_u32.to_le_bytes(), 5_u32.to_le_bytes()].concat();
    bytes.extend((values.len() as u64).to_le_bytes());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

#[test]
fn the_first_token_is_put_where_llama_cpp_puts_it() {
    let first = |pre: &str, more: &[(&str, Vec<u8>)]| {
        let tokens = texts(&["a", "b", "ab", "<|begin|>"]);
        let keys = [("tokens", tokens), ("token_type", integers(&[1, 1, 1, 3]))];
        let keys = keys.into_iter().chain([("merges", texts(&["a b"]))]);
        let keys = keys.chain([("model", text("gpt2")), ("pre", text(pre))]);
        let keys = keys.chain(more.iter().cloned());
        let keys = keys.map(|(key, value)| (format!("tokenizer.ggml.{key}"), value));
        let header = header(&keys.collect::<Vec<_>>(), &[], 0);
        let document = tokenizer::tokenizer(&header).unwrap();
        document["post_processor"]["single"][0]["SpecialToken"]["id"].as_str().map(str::to_owned)
    };
    let bos = ("bos_token_id", count(3));
    let flag = |value: u8| ("add_bos_token", [&7_u32.to_le_bytes()[..], &[value]].concat());
    let put = Some("<|begin|>".to_owned());
    for pre in ["llama-bpe", "llama3", "llama-v3"] {
        assert_eq!(first(pre, std::slice::from_ref(&bos)), put, "{pre}");
        assert_eq!(first(pre, &[bos.clone(), flag(0)]), None, "{pre}");
        assert_eq!(first(pre, &[]), None, "{pre}: no token is named");
    }
    for pre in ["gpt-2", "qwen2", "smollm"] {
        assert_eq!(first(pre, std::slice::from_ref(&bos)), None, "{pre}");
        assert_eq!(first(pre, &[bos.clone(), flag(1)]), put, "{pre}");
    }
}

#[test]
fn pieces_without_named_tokens_have_those_of_llama_cpp() {
    let config = |kinds: &[i32], more: &[(String, Vec<u8>)]| {
        let own = |key: &str| format!("tokenizer.ggml.{key}");
        let mut keys = keys("llama", &[]);
        keys.push((own("model"), text("llama")));
        keys.push((own("tokens"), texts(&["<unk>", "<s>", "</s>", "x"])));
        keys.push((own("token_type"), integers(kinds)));
        keys.extend(more.iter().cloned());
        let header = header(&keys, &[EMBEDDING], 2048);
        (config_of(&header, None).unwrap(), tokenizer::tokenizer_config(&header))
    };
    let (model, names) = config(&[2, 3, 3, 1], &[]);
    assert_eq!((&model["bos_token_id"], &model["eos_token_id"]), (&1.into(), &2.into()));
    assert_eq!((&names["bos_token"], &names["unk_token"]), (&"<s>".into(), &"<unk>".into()));
    // Nothing is taken for a token of text, and a key counts more.
    assert!(config(&[2, 3, 1, 1], &[]).0.get("eos_token_id").is_none());
    let stated = [("tokenizer.ggml.eos_token_id".to_owned(), count(3))];
    assert_eq!(config(&[2, 3, 3, 1], &stated).0["eos_token_id"], 3);
}
