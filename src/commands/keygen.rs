//! `shardpack keygen`.

use std::process::ExitCode;

use serde_json::json;
use shardpack_manifests::signature::{SigningKey, public_path};

use super::Outcome;
use crate::{args::KeygenArgs, progress::result};

/// Runs the command.
pub(crate) fn run(args: &KeygenArgs) -> Outcome {
    let key = SigningKey::generate()?;
    key.write(&args.output)?;
    let (public, hint) = (public_path(&args.output), key.verifying_key().hint());
    if args.form.json {
        let json = json!({ "ok": true, "private": args.output, "public": public, "hint": hint });
        result(&json.to_string());
    } else {
        result(&format!(
            "{}: the private key; keep it secret\n{}: the public key; give it to others (key {hint:.12})",
            args.output.display(),
            public.display(),
        ));
    }
    Ok(ExitCode::SUCCESS)
}
