//! A trained model as a GGUF file: the same model comes out, tokenizer and all.

use super::*;

/// Writes a GGUF file of BF16 tensors (name, shape, data).
fn write(path: &Path, keys: &[(String, Vec<u8>)], tensors: &[(String, Vec<u64>, Vec<u8>)]) {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        bytes.extend(string(key));
        bytes.extend(value);
    }
    let mut offset = 0;
    for (name, shape, data) in tensors {
        bytes.extend(string(name));
        bytes.extend((shape.len() as u32).to_le_bytes());
        bytes.extend(shape.iter().rev().flat_map(|dim| dim.to_le_bytes()));
        bytes.extend(30_u32.to_le_bytes());
        bytes.extend((offset as u64).to_le_bytes());
        offset += data.len().next_multiple_of(32);
    }
    for (.., data) in tensors {
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
    }
    fs::write(path, bytes).unwrap();
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn text(value: &str) -> Vec<u8> {
    [&8_u32.to_le_bytes()[..], &string(value)].concat()
}

fn number(value: u64) -> Vec<u8> {
    [4_u32.to_le_bytes(), (value as u32).to_le_bytes()].concat()
}

fn decimal(value: f64) -> Vec<u8> {
    [6_u32.to_le_bytes(), (value as f32).to_le_bytes()].concat()
}

fn texts(values: &[String]) -> Vec<u8> {
    let head = [9_u32, 8].iter().flat_map(|kind| kind.to_le_bytes()).collect::<Vec<u8>>();
    let strings = values.iter().flat_map(|value| string(value)).collect::<Vec<u8>>();
    [head, (values.len() as u64).to_le_bytes().to_vec(), strings].concat()
}

fn integers(values: &[i32]) -> Vec<u8> {
    let head = [9_u32, 5].iter().flat_map(|kind| kind.to_le_bytes()).collect::<Vec<u8>>();
    let numbers = values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    [head, (values.len() as u64).to_le_bytes().to_vec(), numbers].concat()
}

/// llama.cpp's name for a tensor.
fn their_name(name: &str) -> String {
    let name = name.replace("model.layers.", "blk.");
    let pairs = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    pairs.iter().fold(name, |name, (ours, theirs)| name.replace(ours, theirs))
}

/// What llama.cpp's converter does to queries and keys: of each head the first half of the rows
/// goes to even places, the second to odd ones.
fn permute(data: &[u8], rows: usize, head: usize) -> Vec<u8> {
    let row = data.len() / rows;
    let mut out = vec![0; data.len()];
    for index in 0..rows {
        let (first, within) = (index / head * head, index % head);
        let place = first + within % (head / 2) * 2 + within / (head / 2);
        out[place * row..][..row].copy_from_slice(&data[index * row..][..row]);
    }
    out
}

fn tokenizer_keys(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: &str| fs::read(folder.join(name)).unwrap();
    let tokenizer: Value = serde_json::from_slice(&read("tokenizer.json")).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let mut tokens = vec![String::new(); vocab.len()];
    for (token, id) in vocab {
        tokens[id.as_u64().unwrap() as usize].clone_from(token);
    }
    let mut kinds = vec![1; tokens.len()];
    for added in tokenizer["added_tokens"].as_array().unwrap() {
        kinds[added["id"].as_u64().unwrap() as usize] = 3;
    }
    let merge =
        |pair: &Value| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap());
    let merges: Vec<String> =
        tokenizer["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    let template = String::from_utf8(read("chat_template.jinja")).unwrap();
    let key = |key: &str, value| (format!("tokenizer.{key}"), value);
    vec![
        key("ggml.model", text("gpt2")),
        key("ggml.pre", text("gpt-2")),
        key("ggml.tokens", texts(&tokens)),
        key("ggml.token_type", integers(&kinds)),
        key("ggml.merges", texts(&merges)),
        key("ggml.bos_token_id", number(0)),
        key("ggml.eos_token_id", number(2)),
        key("chat_template", text(&template)),
    ]
}

fn model_keys(config: &Value) -> Vec<(String, Vec<u8>)> {
    let count = |name: &str| number(config[name].as_u64().unwrap());
    let key = |key: &str, value| (format!("llama.{key}"), value);
    vec![
        ("general.architecture".to_owned(), text("llama")),
        key("block_count", count("num_hidden_layers")),
        key("context_length", count("max_position_embeddings")),
        key("embedding_length", count("hidden_size")),
        key("feed_forward_length", count("intermediate_size")),
        key("attention.head_count", count("num_attention_heads")),
        key("attention.head_count_kv", count("num_key_value_heads")),
        key("attention.layer_norm_rms_epsilon", decimal(config["rms_norm_eps"].as_f64().unwrap())),
        key("rope.freq_base", decimal(10_000.0)),
    ]
}

#[test]
fn a_trained_model_comes_out_of_its_gguf_file_as_it_was() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/kjv-4m");
    let original = Source::open(&folder).unwrap();
    let head = original.config["head_dim"].as_u64().unwrap() as usize;
    let tensors: Vec<(String, Vec<u64>, Vec<u8>)> = original
        .tensors()
        .map(|info| {
            let mut data = original.read_tensor(&info.name).unwrap().unwrap();
            if info.name.contains("q_proj") || info.name.contains("k_proj") {
                data = permute(&data, info.shape[0] as usize, head);
            }
            (their_name(&info.name), info.shape.clone(), data)
        })
        .collect();
    let place = tempfile::tempdir().unwrap();
    let keys = [model_keys(&original.config), tokenizer_keys(&folder)].concat();
    write(&place.path().join("kjv.gguf"), &keys, &tensors);

    let source = Source::open(place.path()).unwrap();
    let named = |source: &Source| -> Vec<String> {
        source.logical_tensors().map(|tensor| tensor.name.clone()).collect()
    };
    assert_eq!(named(&source), named(&original));
    for tensor in original.logical_tensors() {
        let found = source.logical(&tensor.name).unwrap();
        assert!(
            values(&source, found, 7) == values(&original, tensor, u64::MAX),
            "{}",
            tensor.name
        );
    }
    let spec = |source: &Source| {
        resolve(&source.config, &source.source_tensors(), &RulePack::builtin()).unwrap().spec
    };
    assert_eq!(spec(&source), spec(&original));
    let json = |source: &Source, name: &str| -> Value {
        serde_json::from_slice(&source.text[name]).unwrap()
    };
    assert_eq!(json(&source, "tokenizer.json"), json(&original, "tokenizer.json"));
    let config = json(&source, "tokenizer_config.json");
    assert_eq!(config["eos_token"], "<|im_end|>");
    let template = fs::read_to_string(folder.join("chat_template.jinja")).unwrap();
    assert_eq!(config["chat_template"], template.as_str());
    // The files beside it win.
    fs::copy(folder.join("tokenizer.json"), place.path().join("tokenizer.json")).unwrap();
    let beside = Source::open(&place.path().join("kjv.gguf")).unwrap();
    assert_eq!(beside.text["tokenizer.json"], original.text["tokenizer.json"]);

    // Keys that name another end than the template's, or none, as many published files do.
    for eos in [Some(0), None] {
        let other = |(name, value): &(String, Vec<u8>)| match (name.ends_with("eos_token_id"), eos)
        {
            (true, Some(eos)) => Some((name.clone(), number(eos))),
            (true, None) => None,
            (false, _) => Some((name.clone(), value.clone())),
        };
        let keys: Vec<_> = keys.iter().filter_map(other).collect();
        let place = tempfile::tempdir().unwrap();
        write(&place.path().join("kjv.gguf"), &keys, &tensors);
        let source = Source::open(place.path()).unwrap();
        let ends: Vec<u64> = eos.into_iter().chain([2]).collect();
        assert_eq!(json(&source, "generation_config.json")["eos_token_id"], Value::from(ends));
        assert!(source.notes.iter().any(|note| note.contains("<|im_end|>")), "{:?}", source.notes);
    }

    // A tokenizer that cannot be built is named, with what to do.
    let mut keys = keys;
    for (name, value) in &mut keys {
        if name == "tokenizer.ggml.pre" {
            *value = text("chameleon");
        }
    }
    let other = tempfile::tempdir().unwrap();
    write(&other.path().join("kjv.gguf"), &keys, &tensors);
    let error = words(&Source::open(other.path()).err().unwrap());
    assert!(error.contains("\"chameleon\"") && error.contains("tokenizer.json"), "{error}");
}

#[test]
fn big_endian_files_and_later_parts_are_told_what_they_are() {
    let place = tempfile::tempdir().unwrap();
    let refused = |name: &str, bytes: &[u8], expected: &[&str]| {
        let path = place.path().join(name);
        fs::write(&path, bytes).unwrap();
        let error = words(&Source::open(&path).err().unwrap());
        for word in expected {
            assert!(error.contains(word), "expected {word:?} in: {error}");
        }
    };
    for version in [2_u32, 3] {
        let bytes = [b"GGUF".as_slice(), &version.to_be_bytes(), &[0; 64]].concat();
        refused("big.gguf", &bytes, &["big-endian", "gguf-convert-endian"]);
    }
    let part = |name: &str, keys: &[(String, Vec<u8>)], expected: &[&str]| {
        write(&place.path().join("part.gguf"), keys, &[]);
        let bytes = fs::read(place.path().join("part.gguf")).unwrap();
        refused(name, &bytes, expected);
    };
    let split = [("split.no".to_owned(), number(2)), ("split.count".to_owned(), number(3))];
    let first = "m-00001-of-00003.gguf";
    part("m-00003-of-00003.gguf", &split, &["part 3 of 3", "first part", first]);
    part("renamed.gguf", &split, &["part 3 of 3", "-00001-of-00003.gguf"]);
    part("m-00002-of-00003.gguf", &[], &["part 2 of 3", first]);
}
