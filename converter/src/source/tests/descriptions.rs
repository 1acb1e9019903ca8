//! Descriptions of quantized weights as other tools write them, over tensors of a known format; and
//! descriptions that were left behind beside plain floats.

use super::*;

/// A copy of a checkpoint with another description; without one, with none.
fn described(name: &str, description: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap();
        if path.is_file() && file != "quantize_config.json" && file != "config.json" {
            fs::copy(&path, folder.path().join(file)).unwrap();
        }
    }
    let config = fs::read(fixture(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["quantization_config"] = description.clone();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

/// Expects the values that the fixture's own description gives.
fn check_same(name: &str, description: &Value) {
    let folder = described(name, description);
    let (found, expected) = (Source::open(folder.path()), Source::open(&fixture(name)).unwrap());
    let found = found.unwrap_or_else(|error| panic!("{description}: {}", words(&error)));
    let names = |source: &Source| -> Vec<String> {
        source.logical_tensors().map(|tensor| tensor.name.clone()).collect()
    };
    assert_eq!(names(&found), names(&expected), "{description}");
    for tensor in expected.logical_tensors() {
        let own = found.logical(&tensor.name).unwrap();
        let (own, wanted) = (values(&found, own, 64), values(&expected, tensor, 64));
        assert!(own == wanted, "{description}: {}", tensor.name);
    }
}

fn check_refused(name: &str, description: &Value, expected: &[&str]) {
    let folder = described(name, description);
    let error = words(&Source::open(folder.path()).err().unwrap());
    for word in expected {
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
}

fn auto_round(packing: &str, more: &Value) -> Value {
    let mut description = json!({
        "quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 64,
        "sym": true, "data_type": "int", "autoround_version": "0.12.3", "iters": 200,
        "enable_quanted_input": true, "block_name_to_quantize": "model.layers",
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        description[key] = value.clone();
    }
    description
}

#[test]
fn auto_round_is_read_in_the_layouts_of_gptq_and_awq() {
    let none = json!({});
    check_same("gptq_4bit_g64_sym", &auto_round("auto_round:auto_gptq", &none));
    check_same("gptq_8bit_g64_sym", &auto_round("auto_round:auto_gptq", &json!({ "bits": 8 })));
    check_same("awq_gemm_4bit_g64", &auto_round("auto_round:auto_awq", &none));
    // Zero points as they are.
    for packing in ["auto_round", "auto_round:gptqmodel"] {
        check_same("gptq_v2_4bit_g64_asym", &auto_round(packing, &json!({ "sym": false })));
    }
    // The older key, with a kernel's name.
    let mut older = auto_round("", &none);
    older.as_object_mut().unwrap().remove("packing_format");
    older["backend"] = "auto_round:gptq:exllamav2".into();
    check_same("gptq_4bit_g64_sym", &older);
}

#[test]
fn auto_round_has_parameters_for_single_modules() {
    // What holds for all is wrong for every module here; each has its own.
    let four = json!({ "bits": 4, "group_size": 64 });
    let named = json!({ "bits": 8, "group_size": 32, "extra_config": {
        "model.layers.0.mlp.up_proj": four,
        "lm_head": { "bits": 16, "data_type": "float" },
        ".*self_attn.*": four,
        ".*mlp\\.(gate|down)_proj": four,
    } });
    check_same("gptq_4bit_g64_sym", &auto_round("auto_round:auto_gptq", &named));
    // Keys that are absent have the value that holds for all.
    let inherited = json!({ "extra_config": { "model.layers.0.mlp.up_proj": { "bits": 4 } } });
    check_same("gptq_4bit_g64_sym", &auto_round("auto_round:auto_gptq", &inherited));
}

#[test]
fn auto_round_in_other_forms_is_refused_by_name() {
    let (gptq, fixture) = ("auto_round:auto_gptq", "gptq_4bit_g64_sym");
    let check = |packing: &str, more: &Value, words: &[&str]| {
        check_refused(fixture, &auto_round(packing, more), words);
    };
    check("auto_round:fp8_static", &json!({}), &["auto-round", "fp8_static"]);
    check("auto_round:llm_compressor", &json!({}), &["auto-round", "llm_compressor"]);
    check(gptq, &json!({ "bits": 3 }), &["auto-round", "3 bits"]);
    check(gptq, &json!({ "data_type": "mx_fp" }), &["auto-round", "mx_fp"]);
    check(gptq, &json!({ "extra_config": { "a": 4 } }), &["extra_config", "object"]);
    check(gptq, &json!({ "extra_config": { "(": { "bits": 4 } } }), &["extra_config", "regular"]);
    check("auto_round:auto_awq", &json!({ "bits": 8 }), &["AWQ", "8 bits"]);
    check(gptq, &json!({ "group_size": 32 }), &["scales", "expected"]);
}

#[test]
fn a_description_that_was_left_behind_changes_nothing() {
    let bitsandbytes = json!({
        "quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4",
    });
    let methods = ["hqq", "exl2", "aqlm", "torchao", "quark", "something"];
    let others = methods.map(|method| json!({ "quant_method": method, "bits": 4 }));
    let gptq = json!({ "quant_method": "gptq", "bits": 3, "group_size": 128 });
    let early = json!({ "load_in_8bit": true });
    for description in [bitsandbytes, gptq, early].iter().chain(&others) {
        for name in ["bf16_sharded", "f16", "f32"] {
            check_same(name, description);
            let folder = described(name, description);
            let source = Source::open(folder.path()).unwrap();
            let is_said = source.notes.iter().any(|note| note == LEFT_OVER);
            assert!(is_said, "{name}: {description}: {:?}", source.notes);
        }
    }
    // With integers in it, it was not.
    let hqq = json!({ "quant_method": "hqq" });
    check_refused("gptq_4bit_g64_sym", &hqq, &["qweight", "how HQQ stored it"]);
    let torchao = json!({ "quant_method": "torchao" });
    check_refused("gptq_4bit_g64_sym", &torchao, &["qweight", "how torchao stored it"]);
    let plain = Source::open(&fixture("bf16_sharded")).unwrap();
    assert!(plain.notes.iter().all(|note| note != LEFT_OVER));
}
