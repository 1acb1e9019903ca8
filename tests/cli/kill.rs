//! Processes killed at named points and at random moments, and run again.

use std::{
    fs,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use tempfile::tempdir;

use crate::harness::{
    convert, copy_folder, data, fail, files, kill, path, paused, run, shardpack, succeed, text,
};

#[test]
fn a_killed_conversion_leaves_no_result_and_goes_on_to_identical_bytes() {
    let folder = tempdir().unwrap();
    let expected = files(&convert("kjv-4m", &folder.path().join("undisturbed"), &["--nodes", "2"]));
    let source = data("kjv-4m");
    let points = [
        ("convert:planned", 0),
        ("convert:tensor:0", 0),
        ("convert:finished:20", 20),
        ("convert:hashing", 39),
        ("convert:publishing", 0),
    ];
    for (point, resumed) in points {
        let output = folder.path().join(point.replace(':', "-"));
        let args = ["convert", path(&source), "-o", path(&output), "--nodes", "2"];
        kill(paused(point, &args));
        assert!(!output.exists(), "{point}: half a result has the final name");
        let again = run(&args);
        let said = text(&again.stderr);
        assert!(again.status.success(), "{said}");
        // The other threads went on while one was paused, so there may be more.
        let taken_up = said
            .split("resuming after ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next()?.parse().ok());
        assert!(
            taken_up.unwrap_or(0) >= resumed,
            "{point}: what was finished is not done again: {said}"
        );
        succeed(&["verify", path(&output)]);
        assert!(files(&output) == expected, "{point}");
    }
}

/// Five kills, or as many as `SHARDPACK_KILLS` says: `just soak` asks for fifty.
#[test]
#[expect(clippy::print_stdout, reason = "a soak tells how many of its kills meant something")]
fn killed_at_random_moments_a_conversion_ends_in_identical_bytes() {
    let kills: u32 = std::env::var("SHARDPACK_KILLS").map_or(5, |kills| kills.parse().unwrap());
    let folder = tempdir().unwrap();
    let source = data("kjv-4m");
    let begun = Instant::now();
    let expected = files(&convert("kjv-4m", &folder.path().join("undisturbed"), &["--nodes", "2"]));
    let whole = begun.elapsed();
    // Multiplier and increment of Knuth's MMIX; the moments lie anywhere in the run.
    let mut state = u64::from(std::process::id());
    let mut unfinished = 0;
    for number in 0..kills {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = whole.mul_f64((state >> 11) as f64 / (1_u64 << 53) as f64);
        let output = folder.path().join(number.to_string());
        let args = ["convert", path(&source), "-o", path(&output), "--nodes", "2"];
        let child =
            shardpack().args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(moment.max(Duration::from_millis(1)));
        kill(child);
        if !output.exists() {
            unfinished += 1;
            succeed(&args);
        }
        succeed(&["verify", path(&output)]);
        assert!(files(&output) == expected, "kill {number}, after {moment:?} of {whole:?}");
        fs::remove_dir_all(&output).unwrap();
    }
    println!("{unfinished} of {kills} kills came before the result was there");
    // How many come in time is a matter of the machine; every point of a conversion has its own kill above.
}

#[test]
fn what_a_killed_conversion_left_is_not_trusted_blindly() {
    let folder = tempdir().unwrap();
    let expected = files(&convert("kjv-4m", &folder.path().join("undisturbed"), &["--nodes", "2"]));
    let source = data("kjv-4m");
    let output = folder.path().join("set");
    let args = ["convert", path(&source), "-o", path(&output), "--nodes", "2", "--threads", "1"];
    let partial = folder.path().join(".set.partial");
    // Damage to what was written, to the journal's last line, and other options.
    let weights = |node: &str| partial.join(node).join("model-00001-of-00001.safetensors");
    let damage = |file: std::path::PathBuf, at: usize| {
        let mut bytes = fs::read(&file).unwrap();
        let at = at.min(bytes.len() - 5);
        bytes[at] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    for case in 0..3 {
        kill(paused("convert:finished:10", &args));
        match case {
            0 => damage(weights("node-1"), 20_000),
            1 => damage(partial.join(".journal"), usize::MAX),
            _ => kill(paused("convert:finished:5", &[args.as_slice(), &["--bits", "8"]].concat())),
        }
        succeed(&args);
        assert!(files(&output) == expected, "case {case}");
        fs::remove_dir_all(&output).unwrap();
    }
}

#[test]
fn a_source_that_changed_after_the_kill_is_converted_anew() {
    let folder = tempdir().unwrap();
    let (source, other) = (folder.path().join("model"), folder.path().join("other"));
    copy_folder(&data("kjv-4m"), &source);
    let output = folder.path().join("set");
    let args = ["convert", path(&source), "-o", path(&output)];
    kill(paused("convert:finished:30", &args));
    let file = source.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    // A weight of an early tensor, with the file's size and header as before.
    let at = bytes.len() - 8_000_000;
    bytes[at] ^= 0x10;
    fs::write(&file, bytes).unwrap();
    succeed(&args);
    succeed(&["convert", path(&source), "-o", path(&other)]);
    assert!(files(&output) == files(&other));
}

#[test]
fn the_source_is_hashed_whole_whatever_was_finished_before() {
    let folder = tempdir().unwrap();
    let source = data("kjv-4m");
    let weights = fs::read(source.join("model.safetensors")).unwrap();
    let expected = blake3::hash(&weights).to_string();
    // Tensors hash what is read for them; what a resumed run does not convert it hashes apart.
    for finished in [None, Some(0), Some(1), Some(7), Some(20), Some(38)] {
        for threads in ["1", "3"] {
            let output = folder.path().join(format!("{finished:?}-{threads}"));
            let args = ["convert", path(&source), "-o", path(&output), "--threads", threads];
            if let Some(finished) = finished {
                kill(paused(&format!("convert:finished:{finished}"), &args));
            }
            succeed(&args);
            let manifest = fs::read(output.join("node-0/manifest.json")).unwrap();
            let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
            let files = manifest["source"]["files"].as_array().unwrap();
            let found = files.iter().find(|file| file["name"] == "model.safetensors").unwrap();
            assert_eq!(found["blake3"], expected, "{finished:?} finished, {threads} threads");
            fs::remove_dir_all(&output).unwrap();
        }
    }
}

#[test]
fn two_conversions_of_one_output_do_not_meet() {
    let folder = tempdir().unwrap();
    let (source, output) = (data("kjv-4m"), folder.path().join("set"));
    let args = ["convert", path(&source), "-o", path(&output)];
    let first = paused("convert:tensor:3", &args);
    assert!(fail(2, &args).contains("another conversion"));
    kill(first);
    succeed(&args);
}
