//! The user's own rules: reads them, and scaffolds rules for a model that no rules match.

use std::path::Path;

use shardpack_converter::{PlanError, Source, rules};

use crate::{args::PlanArgs, failure::Failure};

/// The file of `--rules`.
pub(super) fn read(path: &Path) -> Result<rules::OwnRules, Failure> {
    rules::read(path)
        .map_err(|error| if error.is_wrong() { Failure::wrong(error) } else { error.into() })
}

/// The error for a model that no rules match; with `--scaffold-rules`, a first version is written.
pub(super) fn refuse(source: &Source, error: PlanError, args: &PlanArgs) -> Failure {
    let failure = Failure::wrong(error);
    let Some(path) = &args.scaffold_rules else {
        return failure.hint(format!(
            "shardpack plan {} --scaffold-rules rules.toml writes a first version of rules for it",
            args.source.path.display()
        ));
    };
    match rules::write_draft(source, path) {
        Ok(draft) => failure.hint(format!(
            "{0} has scaffolded rules based on {1}; decide its {2} points of `todo`, then continue with --rules {0}",
            path.display(),
            draft.nearest,
            draft.points
        )),
        Err(error) => {
            let error = anyhow::Error::from(error);
            failure.hint(format!("no rules were scaffolded: {error:#}"))
        }
    }
}
