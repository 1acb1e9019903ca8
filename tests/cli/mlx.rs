//! How commands refuse an MLX runtime that is missing or damaged, and collectives of MLX that cannot
//! work.

use std::fs;

use shardpack_mlx::runtime;
use tempfile::tempdir;

use crate::{
    harness::{fail, path, run, shardpack, text},
    sets::{kjv, kjv_for_two},
    skip::{mlx_runtime, skip},
};

#[test]
fn a_missing_mlx_runtime_says_how_to_install_it() {
    let folder = tempdir().unwrap();
    let engines = folder.path().join("engines");
    let check = ["engine", "check", "mlx", "--dir", engines.to_str().unwrap()];
    let output = fail(2, &check);
    assert!(output.contains("no MLX runtime"), "{output}");
    assert!(output.contains("engine install mlx"), "{output}");
    assert!(output.contains("--engine cpu"), "{output}");
}

#[test]
fn a_damaged_runtime_is_refused_by_every_command() {
    let folder = tempdir().unwrap();
    let set = kjv(&folder.path().join("set"));
    let damaged = folder.path().join("engines").join(runtime::FOLDER);
    fs::create_dir_all(&damaged).unwrap();
    fs::write(damaged.join("runtime.json"), "{}").unwrap();
    let engines = folder.path().join("engines");
    let refused = |args: &[&str], code: i32| {
        let output = shardpack().args(args).env("SHARDPACK_ENGINES", &engines).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        let error = text(&output.stderr);
        assert!(error.contains("not a runtime record"), "{error}");
        assert!(error.contains("engine install mlx"), "{error}");
    };
    refused(&["engine", "check", "mlx"], 1);
    refused(&["serve", path(&set), "--listen", "127.0.0.1:0", "--engine", "mlx"], 2);
    let store = folder.path().join("store");
    refused(&["node", "--listen", "127.0.0.1:0", "--store", path(&store), "--engine", "mlx"], 2);
}

/// How `serve` refuses what MLX would wait for for ever.
#[test]
fn mlx_collectives_that_cannot_work_are_refused() {
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let refused = |options: &[&str], words: &[&str]| {
        let mut args = vec!["serve", path(&set), "--listen", "127.0.0.1:0"];
        args.extend(options);
        let error = fail(2, &args);
        for word in words {
            assert!(error.contains(word), "{error}");
        }
    };
    refused(&["--collectives", "ring"], &["--engine mlx"]);
    let jaccl = ["--engine", "mlx", "--collectives", "jaccl"];
    refused(&jaccl, &["jaccl needs the RDMA device"]);
    let hosts = folder.path().join("hosts.json");
    let hostfile = |json: &str| {
        fs::write(&hosts, json).unwrap();
        [jaccl.as_slice(), &["--hostfile", path(&hosts)]].concat()
    };
    let one = r#"[{"ips": ["10.0.0.1"], "rdma": [null]}]"#;
    refused(&hostfile(one), &["the host file has 1 hosts", "2 ranks"]);
    let open = r#"[{"ips": ["10.0.0.1"], "rdma": [null, null]}, {"ips": [], "rdma": ["a", null]}]"#;
    refused(&hostfile(open), &["rank 0 has no RDMA device to rank 1", "--collectives auto"]);
    refused(&hostfile("[]"), &["hosts.json", "not a host file", "0 hosts"]);
    refused(&["--hostfile", path(&hosts)], &["--collectives ring, jaccl and jaccl-ring"]);
    for engine in ["cpu", "mlx"] {
        let collectives = if engine == "cpu" { "rdma" } else { "ring" };
        let options = ["--engine", engine, "--collectives", collectives, "--require-encryption"];
        refused(&options, &["not encrypted"]);
    }
    refused(&["--engine", "mlx", "--platform", "avx2"], &["--platform"]);
    let node = ["node", "--store", path(folder.path()), "--engine", "mlx", "--collectives", "ring"];
    assert!(run_error(&node).contains("serve"), "a node cannot know all ranks");
}

/// The error of a command that must not run.
fn run_error(args: &[&str]) -> String {
    let output = run(args);
    assert!(!output.status.success());
    text(&output.stderr)
}

/// A set's own description of its devices reaches MLX, which has no JACCL on Linux.
#[test]
fn jaccl_without_rdma_is_refused_by_name() {
    let Some(_) = mlx_runtime(runtime::FOLDER) else { return };
    if cfg!(target_os = "macos") {
        return skip("no-jaccl", "this machine may have JACCL");
    }
    let folder = tempdir().unwrap();
    let set = kjv_for_two(&folder.path().join("set"));
    let hosts = folder.path().join("hosts.json");
    let json = r#"[{"ips": ["127.0.0.1"], "rdma": [null, "rdma_en5"]},
                   {"ips": ["127.0.0.1"], "rdma": ["rdma_en5", null]}]"#;
    fs::write(&hosts, json).unwrap();
    let options = ["--engine", "mlx", "--collectives", "jaccl", "--hostfile", path(&hosts)];
    let mut args = vec!["serve", path(&set), "--listen", "127.0.0.1:0"];
    args.extend(options);
    let error = fail(1, &args);
    assert!(error.contains("this build of MLX has no jaccl"), "{error}");
}
