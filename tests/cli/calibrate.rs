//! `calibrate`, and conversions that round by what it measured.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use tempfile::tempdir;

use crate::harness::{
    convert, copy_folder, data, fail, files, kill, path, paused, run, succeed, text,
};

/// Enough that every matrix of kjv-4m is rounded with feedback.
const TOKENS: &str = "2048";

fn calibrate(output: &Path, options: &[&str]) -> PathBuf {
    let source = data("kjv-4m");
    let mut args = vec!["calibrate", path(&source), "-o", path(output), "--tokens", TOKENS];
    args.extend(options);
    succeed(&args);
    output.to_owned()
}

/// Verses that kjv-4m was not trained on.
fn held_out() -> String {
    let verses = json(&data("kjv-4m").join("heldout.json"));
    let verses = verses.as_array().unwrap().iter().take(100);
    verses.map(|verse| verse["text"].as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

/// Sensitivities too, in steps that a test has time for.
const SENSITIVITY: [&str; 4] = ["--context", "256", "--sensitivity", "256"];

/// A conversion that is refused, with these words, and writes nothing.
fn check_refused(output: &Path, (code, options): (i32, &[&str]), expected: &str) {
    let source = data("kjv-4m");
    let args = ["convert", path(&source), "-o", path(output)];
    let error = fail(code, &[&args[..], options].concat());
    assert!(error.contains(expected), "{options:?}: {error}");
    assert!(!output.exists());
}

fn json(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

#[test]
fn a_killed_calibration_goes_on_to_the_bytes_of_one_thread() {
    let folder = tempdir().unwrap();
    let one = [&SENSITIVITY[..], &["--threads", "1"]].concat();
    let expected = files(&calibrate(&folder.path().join("one"), &one));
    let (source, output) = (data("kjv-4m"), folder.path().join("killed"));
    let args = ["calibrate", path(&source), "-o", path(&output), "--tokens", TOKENS];
    let args = [&args[..], &SENSITIVITY].concat();
    for point in ["calibrate:layer:2", "sensitivity:layer:2"] {
        kill(paused(point, &args));
        assert!(!output.exists(), "half a result has the final name");
    }
    let again = run(&args);
    let said = text(&again.stderr);
    assert!(again.status.success(), "{said}");
    for resumed in
        ["4 layers that an earlier run has finished", "2 layers that an earlier run has measured"]
    {
        assert!(said.contains(&format!("resuming after {resumed}")), "{said}");
    }
    assert!(files(&output) == expected, "other bytes");
    assert!(!folder.path().join("killed.part").exists(), "its work is left over");
    let error = fail(2, &args);
    assert!(error.contains("exists already"), "{error}");
}

#[test]
fn feedback_lowers_the_error_of_every_matrix_and_calibrating_on_the_way_changes_no_byte() {
    let folder = tempdir().unwrap();
    let out = |name: &str| folder.path().join(name);
    let stats = calibrate(&out("stats"), &["--context", "256"]);
    let index = json(&stats.join("calibration.json"));
    // Four distinct inputs of each layer, and the head's.
    assert_eq!(index["inputs"].as_array().unwrap().len(), 4 * 4 + 1);
    assert_eq!(index["tokens"], 2048);
    let options = ["--bits", "4", "--rounding", "gptq", "--stats", path(&stats)];
    let set = convert("kjv-4m", &out("set"), &options);
    succeed(&["verify", path(&set)]);
    let report = json(&set.join("report.json"));
    let tensors = report["tensors"].as_object().unwrap();
    let mut matrices = 0;
    for (name, tensor) in tensors {
        let Some(error) = tensor["output_error"].as_f64() else { continue };
        let refined = tensor["output_error_refined"].as_f64().unwrap();
        assert!(error < 0.8 * refined, "{name}: {error} against {refined}");
        matrices += 1;
    }
    assert_eq!(matrices, 4 * 7 + 1);

    let two = ["--nodes", "2", "--threads", "1"];
    let sharded = convert("kjv-4m", &out("two"), &[&options[..], &two].concat());
    let weights = |set: &Path| json(&set.join("node-0/manifest.json"))["ids"]["weights"].clone();
    assert_eq!(weights(&set), weights(&sharded), "the number of nodes or threads changes weights");
}

#[test]
fn calibrating_on_the_way_gives_the_same_packages_and_leaves_nothing() {
    let folder = tempdir().unwrap();
    let out = |name: &str| folder.path().join(name);
    let words = out("words.txt");
    fs::write(&words, "In the beginning God created the heaven and the earth. ".repeat(200))
        .unwrap();
    let stats = out("stats");
    let source = data("kjv-4m");
    succeed(&["calibrate", path(&source), "-o", path(&stats), "--text", path(&words)]);
    let options = ["--rounding", "gptq", "--stats", path(&stats)];
    let set = convert("kjv-4m", &out("set"), &options);
    fs::create_dir(out("beside")).unwrap();
    let at_once = out("beside/set");
    succeed(&["convert", path(&source), "-o", path(&at_once), "--calibrate", path(&words)]);
    let packages = |set: &Path| files(&set.join("node-0"));
    assert!(packages(&set) == packages(&at_once), "other bytes");
    let left: Vec<_> = fs::read_dir(out("beside")).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn an_importance_matrix_is_written_as_it_is_read() {
    let folder = tempdir().unwrap();
    let imatrix = folder.path().join("kjv.imatrix");
    calibrate(&folder.path().join("stats"), &["--imatrix-out", path(&imatrix)]);
    let plain = convert("kjv-4m", &folder.path().join("plain"), &[]);
    let weighted = convert("kjv-4m", &folder.path().join("set"), &["--imatrix", path(&imatrix)]);
    let weights = |set: &Path| json(&set.join("node-0/manifest.json"))["ids"]["weights"].clone();
    assert_ne!(weights(&plain), weights(&weighted));
}

#[test]
fn statistics_that_do_not_fit_are_refused() {
    let folder = tempdir().unwrap();
    let source = data("kjv-4m");
    let output = folder.path().join("set");
    let check = |code: i32, options: &[&str], expected: &str| {
        check_refused(&output, (code, options), expected);
    };
    check(2, &["--rounding", "gptq"], "needs --stats or --calibrate");
    let stats = calibrate(&folder.path().join("stats"), &[]);
    // What a plan says needs none; given ones are checked.
    let planned = |options: &[&str]| run(&[&["plan", path(&source)][..], options].concat());
    let gptq = ["--rounding", "gptq"];
    let said = planned(&gptq);
    assert!(said.status.success() && text(&said.stderr).contains("needs --stats or --calibrate"));
    let with_stats = planned(&[&gptq[..], &["--stats", path(&stats)]].concat());
    assert!(with_stats.status.success() && with_stats.stderr.is_empty());
    assert_eq!(with_stats.stdout, said.stdout);
    assert_eq!(planned(&["--stats", path(&stats)]).status.code(), Some(2));
    check(2, &["--stats", path(&stats)], "the rounding is refined; add --rounding gptq");
    let with = |folder: &Path, code: i32, expected: &str| {
        check(code, &["--rounding", "gptq", "--stats", path(folder)], expected);
    };
    with(&folder.path().join("nowhere"), 2, "cannot read");

    let damaged = folder.path().join("damaged");
    copy_folder(&stats, &damaged);
    let file = damaged.join("layer-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    with(&damaged, 1, "is not what was written; calibrate again");

    let index = fs::read_to_string(stats.join("calibration.json")).unwrap();
    fs::write(damaged.join("calibration.json"), index.replace("\"format\": 1", "\"format\": 2"))
        .unwrap();
    with(&damaged, 1, "format 2, this version reads 1");
    fs::write(
        damaged.join("calibration.json"),
        index.replace("model.", "other.").replace("lm_head", "head"),
    )
    .unwrap();
    with(&damaged, 1, "it was made for another model");
}

#[test]
fn bits_are_given_out_by_what_rounding_each_matrix_does() {
    let folder = tempdir().unwrap();
    let out = |name: &str| folder.path().join(name);
    let stats = calibrate(&out("stats"), &SENSITIVITY);
    let measured = json(&stats.join("sensitivity.json"));
    let modules = measured["modules"].as_array().unwrap();
    // Seven matrices of each layer, the embedding, the head.
    assert_eq!(modules.len(), 4 * 7 + 2);
    for module in modules {
        assert!(module["kl"].as_f64().unwrap() > 0.0, "{module}");
        let error = |bits: u32, group_size: u32| {
            let errors = module["errors"].as_array().unwrap().iter();
            let found = errors
                .filter(|it| it["bits"] == bits && it["group_size"] == group_size)
                .map(|it| it["error"].as_f64().unwrap());
            found.sum::<f64>()
        };
        assert!((error(4, 64) - 1.0).abs() < 1e-12, "{module}");
        let falls = [error(3, 64), error(4, 64), error(5, 64), error(6, 64), error(8, 64)];
        assert!(falls.is_sorted_by(|a, b| a > b), "{module}");
        assert!(error(4, 32) < 1.0, "{module}");
    }

    let given = ["--bpw", "4.5", "--stats", path(&stats)];
    let set = convert("kjv-4m", &out("set"), &given);
    let report = json(&set.join("report.json"));
    let bits = report["bits_per_weight"].as_f64().unwrap();
    assert!((4.47..=4.5).contains(&bits), "{bits}");
    let manifest = json(&set.join("node-0/manifest.json"));
    assert!(manifest["quantization"]["overrides"].as_object().unwrap().len() > 3, "{manifest}");
    // The recipe alone gives the same weights.
    let recipe = set.join("recipe.txt");
    let options = ["--recipe", path(&recipe), "--rounding", "gptq", "--stats", path(&stats)];
    let again = convert("kjv-4m", &out("again"), &options);
    let weights = |set: &Path| json(&set.join("node-0/manifest.json"))["ids"]["weights"].clone();
    assert_eq!(weights(&set), weights(&again));

    // At the same size as smaller groups everywhere, the model is nearer to its original.
    let stats_of = ["--stats", path(&stats)];
    let five = convert("kjv-4m", &out("five"), &[&["--bpw", "5"][..], &stats_of].concat());
    let groups = ["--group-size", "32", "--rounding", "gptq"];
    let uniform = convert("kjv-4m", &out("uniform"), &[&groups[..], &stats_of].concat());
    let plain = convert("kjv-4m", &out("plain"), &["--bits", "16"]);
    let words = out("held-out.txt");
    fs::write(&words, held_out()).unwrap();
    let args = ["eval", path(&five), path(&uniform), "--exact", "--context", "128", "--json"];
    let args = [&args[..], &["--text", path(&words), "--against", path(&plain)]].concat();
    let found: Value = serde_json::from_str(&succeed(&args)).unwrap();
    let kl = |set: usize| found["sets"][set]["against"]["kl_mean"]["value"].as_f64().unwrap();
    assert!(kl(0) < 0.9 * kl(1), "{} with bits given out, {} without", kl(0), kl(1));
    check_budgets(folder.path(), &stats);
    check_fit(&stats);
}

/// Budgets that are not possible.
fn check_budgets(folder: &Path, stats: &Path) {
    let output = folder.join("refused");
    let check = |code: i32, options: &[&str], expected: &str| {
        check_refused(&output, (code, options), expected);
    };
    let source = data("kjv-4m");
    let none = ["calibrate", path(&source), "-o", path(&output), "--sensitivity", "0"];
    assert!(fail(2, &none).contains("--sensitivity 0 is not possible; 16 or more are"));
    check(2, &["--bpw", "4.5"], "--bpw 4.5 gives out bits by what");
    check(2, &["--bpw", "40"], "neither a number from 2 to 16");
    check(2, &["--bpw", "5", "--bits", "4"], "cannot be used with");
    let with = |stats: &Path, code: i32, options: &[&str], expected: &str| {
        check(code, &[options, &["--stats", path(stats)]].concat(), expected);
    };
    with(stats, 2, &["--size", "1m"], "is too little: with the fewest bits");
    with(stats, 2, &["--bpw", "fit"], "needs the nodes' memory");
    let small = ["--bpw", "fit", "--nodes", "a=2m:1m"];
    with(stats, 2, &small, "a rank needs more than its node allows");
    let other = folder.join("other");
    copy_folder(stats, &other);
    let file = other.join("sensitivity.json");
    let measured = fs::read_to_string(&file).unwrap();
    let foreign = measured.replace("model.", "other.").replace("lm_head", "head");
    fs::write(&file, foreign).unwrap();
    with(&other, 1, &["--bpw", "4.5"], "it was made for another model");
    fs::write(&file, measured.replace("\"kl\": ", "\"kl\": -")).unwrap();
    with(&other, 1, &["--bpw", "4.5"], "a divergence of -");
    fs::remove_file(file).unwrap();
    with(&other, 2, &["--bpw", "4.5"], "calibrate again with --sensitivity");
}

/// As many bits as nodes allow.
fn check_fit(stats: &Path) {
    let source = data("kjv-4m");
    let plan = |asked: &[&str]| -> Value {
        let args = ["plan", path(&source), "--stats", path(stats), "--context", "64", "--json"];
        serde_json::from_str(&succeed(&[&args[..], asked].concat())).unwrap()
    };
    let needs = |plan: &Value| plan["ranks"][0]["total_bytes"].as_u64().unwrap();
    // Between what two budgets need there is one that fits.
    let [few, many] = ["4.2", "6"].map(|bits| needs(&plan(&["--bpw", bits, "--nodes", "2"])));
    let limit = few.midpoint(many);
    let nodes = format!("a={limit}:{limit},b={limit}:{limit}");
    let fitted = plan(&["--bpw", "fit", "--nodes", &nodes]);
    assert_eq!(fitted["ok"], true);
    assert!((few..=limit).contains(&needs(&fitted)), "{few} {fitted} {limit}");
    assert!(limit - needs(&fitted) < (many - few) / 4, "{fitted}");
}
