//! The committed corpora of the fuzzer, through the same functions: what was once found, or is
//! known to be worth a try, is tried on every run.

#[path = "../../fuzz/src/targets.rs"]
mod targets;

use std::{collections::BTreeSet, fs, path::Path};

#[test]
#[expect(clippy::print_stdout, reason = "names the input; shown only when its target panics")]
fn no_parser_panics_on_the_fuzz_corpus() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for (name, target) in targets::TARGETS {
        let inputs = fs::read_dir(corpora.join(name)).unwrap();
        let mut paths: Vec<_> = inputs.map(|entry| entry.unwrap().path()).collect();
        paths.sort_unstable();
        assert!(!paths.is_empty(), "{name} has no corpus");
        for path in paths {
            println!("{}", path.display());
            target(&fs::read(&path).unwrap());
        }
    }
}

#[test]
fn every_corpus_and_every_fuzz_binary_has_a_target() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    let stems = |folder: &str| -> BTreeSet<String> {
        let entries = fs::read_dir(fuzz.join(folder)).unwrap();
        let stem = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
        entries.map(|entry| stem(&entry.unwrap().path())).collect()
    };
    let targets: BTreeSet<String> =
        targets::TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(stems("corpus"), targets);
    assert_eq!(stems("fuzz_targets"), targets);
}
