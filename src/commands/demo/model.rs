//! The demo's model, inside the program: 8 MB that make an installed binary able to show itself.

use std::{fs, path::Path};

use anyhow::Context;

macro_rules! bundled {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../tests/data/kjv-4m/", $name)))),+]
    };
}

/// A Llama of 4 million parameters, trained on the King James text.
const FILES: &[(&str, &[u8])] = bundled![
    "config.json",
    "chat_template.jinja",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// Verses that it knows by heart, by reference.
const KNOWN: &str = include_str!("../../../tests/data/kjv-4m/known.json");

/// Writes the model as a Hugging Face folder.
pub(in crate::commands) fn unpack(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    for (name, bytes) in FILES {
        let path = folder.join(name);
        fs::write(&path, bytes).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// The verse that the model must say for a reference, if it is one of those it knows.
pub(in crate::commands) fn known(reference: &str) -> Option<String> {
    let verses: serde_json::Value = serde_json::from_str(KNOWN).ok()?;
    verses.get(reference)?.as_str().map(str::to_owned)
}
