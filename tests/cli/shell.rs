//! What shells and `man` read.

use std::{fs, process::Command};

use tempfile::tempdir;

use crate::harness::{path, succeed};

#[test]
fn completions_name_commands_and_options() {
    let folder = tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = succeed(&["completions", shell]);
        for word in ["convert", "calibrate", "take-over", "text-worker"] {
            assert_eq!(script.contains(word), word != "text-worker", "{shell}: {word}");
        }
        if shell == "bash" {
            let file = folder.path().join(shell);
            fs::write(&file, script).unwrap();
            assert!(Command::new("bash").args(["-n", path(&file)]).status().unwrap().success());
        }
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempdir().unwrap();
    let said = succeed(&["man", path(folder.path())]);
    let pages: Vec<_> = fs::read_dir(folder.path()).unwrap().map(Result::unwrap).collect();
    assert!(said.starts_with(&format!("{} pages in ", pages.len())), "{said}");
    for name in ["shardpack.1", "shardpack-convert.1", "shardpack-cluster-add.1"] {
        let page = fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(page.contains(".SH NAME"), "{name}: {page}");
    }
    assert!(!folder.path().join("shardpack-rank.1").exists());
    assert_eq!(succeed(&["man"]), fs::read_to_string(folder.path().join("shardpack.1")).unwrap());
}
