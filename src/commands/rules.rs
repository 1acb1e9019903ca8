//! Rules of the user's: reading them, and a draft for a model that no rules fit.

use std::path::Path;

use shardpack_converter::{PlanError, Source, rules};

use crate::{args::PlanArgs, failure::Failure};

/// The file of `--rules`.
pub(super) fn read(path: &Path) -> Result<rules::OwnRules, Failure> {
    rules::read(path)
        .map_err(|error| if error.is_wrong() { Failure::wrong(error) } else { error.into() })
}

/// What is said of a model that no rules fit; with `--draft`, a draft of some is written.
pub(super) fn refuse(source: &Source, error: PlanError, args: &PlanArgs) -> Failure {
    let failure = Failure::wrong(error);
    let Some(path) = &args.draft else {
        return failure.hint(format!(
            "shardpack plan {} --draft rules.toml writes down what was seen of it, for rules of your own",
            args.source.display()
        ));
    };
    match rules::write_draft(source, path) {
        Ok(draft) => failure.hint(format!(
            "{0} has a draft on {1}; decide its {2} points of `todo`, then go on with --rules {0}",
            path.display(),
            draft.nearest,
            draft.points
        )),
        Err(error) => {
            let error = anyhow::Error::from(error);
            failure.hint(format!("there is no draft: {error:#}"))
        }
    }
}
