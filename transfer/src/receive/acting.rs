//! What changes a node, and what only looks: after a handover only the controller that acts may change
//! it. Bytes of packages may come from any controller: they change nothing that anybody sees before a
//! release names them.

use serde_json::Value;
use shardpack_identity::Replaced;

use super::documents::DOCUMENT;
use crate::protocol::{Failure, FailureCode, Operation, ReceiverAction};

/// Operations that only look.
const QUESTIONS: &[&str] = &[
    "activation.state",
    "chunks.find",
    "controller.present",
    "controller.state",
    "events",
    "facts",
    "front.list",
    "front.logs",
    DOCUMENT,
    "program.state",
];

/// Whether an action changes what the node serves, runs or keeps.
pub(super) fn changes(action: &ReceiverAction) -> bool {
    match action {
        ReceiverAction::Activate(_) | ReceiverAction::StartRank(_) => true,
        ReceiverAction::Operate(Operation { name, parameters }) => {
            let has = |key: &str| {
                let parameters: Option<Value> = serde_json::from_str(parameters).ok();
                parameters.is_some_and(|it| it[key] == true)
            };
            match name.as_str() {
                "gc" => !has("dry_run"),
                "fsck" => has("rebuild"),
                // One that is not known here counts as a change.
                name => !QUESTIONS.contains(&name),
            }
        }
        ReceiverAction::Reply(_)
        | ReceiverAction::Stage(_)
        | ReceiverAction::Join(_)
        | ReceiverAction::Store { .. }
        | ReceiverAction::Seal
        | ReceiverAction::List
        | ReceiverAction::Fetch(_)
        | ReceiverAction::Put { .. } => false,
    }
}

/// Whether an operation is a step of an activation that changes the record of releases.
pub(super) fn is_release_step(name: &str) -> bool {
    name.starts_with("activation.") && !QUESTIONS.contains(&name)
}

/// What a controller that was replaced is told.
pub(super) fn refusal(replaced: &Replaced) -> Failure {
    Failure { code: FailureCode::Replaced, message: replaced.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_was_replaced_may_look_and_not_touch() {
        let check = |name: &str, parameters: &str, expected: bool| {
            let (name, parameters) = (name.to_owned(), parameters.to_owned());
            let action = ReceiverAction::Operate(Operation { name, parameters });
            assert_eq!(changes(&action), expected, "{action:?}");
        };
        for name in ["facts", "activation.state", "front.logs", "controller.present"] {
            check(name, "{}", false);
        }
        for name in ["activation.prepare", "activation.commit", "front.start", "of a later version"]
        {
            check(name, "{}", true);
        }
        check("gc", r#"{"dry_run":true}"#, false);
        check("gc", "no JSON", true);
        check("fsck", r#"{"rebuild":true}"#, true);
        check("fsck", "{}", false);
        assert!(!changes(&ReceiverAction::List));
    }
}
