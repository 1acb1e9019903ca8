//! `shardpack push-hub`.

use std::process::ExitCode;

use serde_json::json;

use super::{Outcome, package};
use crate::{args::PushHubArgs, progress::result};

/// Runs the command.
pub(crate) fn run(args: &PushHubArgs) -> Outcome {
    let set = package::read_set(&args.set)?;
    for folder in package::folders(&args.set, &set) {
        package::read_manifest(&folder)?;
    }
    let commit = upload(args)?;
    if args.form.json {
        result(&json!({ "repository": args.repository, "commit": commit }).to_string());
    } else {
        result(&format!("{} is at commit {commit}", args.repository));
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(feature = "hub")]
fn upload(args: &PushHubArgs) -> Result<String, crate::failure::Failure> {
    use shardpack_converter::hub::Visibility;
    let visibility = if args.private { Visibility::Private } else { Visibility::Public };
    crate::source::hub::upload(&args.repository, &args.set, visibility)
}

#[cfg(not(feature = "hub"))]
fn upload(_: &PushHubArgs) -> Result<String, crate::failure::Failure> {
    Err(anyhow::anyhow!("this program was built without the feature `hub`").into())
}
