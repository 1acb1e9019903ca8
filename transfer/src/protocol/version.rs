//! Versions of the conversation: which one two sides use, and what a version can do.
//!
//! A controller's `Hello` names the lowest version that it speaks and, behind its program's name, the
//! whole range (`shardpack 0.2.0 (transfer 1-2)`). The node answers with the highest version that both
//! speak. A program of version 1 knows no ranges: it reads the number alone, takes the text for a name,
//! and is answered in version 1. The range stands in the text because version 1 refuses a `Hello` with
//! another field.

use std::fmt;

use super::failure::{Failure, FailureCode};

/// What this program speaks.
///
/// 1: the first. 2: `Hello` with a range; operations `controller.…` and `program.…`.
pub const SPOKEN: Versions = Versions { lowest: 1, highest: 2 };

/// The range's place in a program's name.
const BEGIN: &str = " (transfer ";
const END: &str = ")";

/// Versions of the protocol that a program speaks, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The lowest.
    pub lowest: u16,
    /// The highest.
    pub highest: u16,
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lowest, highest } = self;
        if lowest == highest { write!(f, "{lowest}") } else { write!(f, "{lowest} to {highest}") }
    }
}

impl Versions {
    /// The highest version of both.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.highest.min(other.highest);
        (highest >= self.lowest.max(other.lowest)).then_some(highest)
    }

    /// Whether a version is one of them.
    #[must_use]
    pub fn contains(self, version: u16) -> bool {
        (self.lowest..=self.highest).contains(&version)
    }

    /// A program's name with the range, as a `Hello` holds it.
    pub(super) fn named(self, program: &str) -> String {
        format!("{program}{BEGIN}{}-{}{END}", self.lowest, self.highest)
    }

    /// What a `Hello` says: the program's name, and the range, which is one version where none stands
    /// there.
    pub(super) fn of_hello(protocol: u16, program: &str) -> (&str, Self) {
        let alone = (program, Self { lowest: protocol, highest: protocol });
        let Some((name, range)) = program.split_once(BEGIN) else { return alone };
        let range = range.strip_suffix(END).and_then(|range| range.split_once('-'));
        let numbers = range.and_then(|(lowest, highest)| {
            Some(Self { lowest: lowest.parse().ok()?, highest: highest.parse().ok()? })
        });
        numbers.filter(|it| it.lowest <= it.highest).map_or(alone, |it| (name, it))
    }

    /// The version of a conversation with the caller that sent this `Hello`, or why there is none.
    pub(super) fn answer(self, protocol: u16, program: &str) -> Result<u16, Failure> {
        let (name, theirs) = Self::of_hello(protocol, program);
        self.common(theirs).ok_or_else(|| {
            let what = if theirs.lowest > self.highest { "this node" } else { "the caller" };
            let message = format!(
                "{name} speaks transfer protocol {theirs}, this node {self}: upgrade {what}"
            );
            Failure { code: FailureCode::Version, message }
        })
    }
}

/// The answer of a node that chose a version which was not offered, or knows no other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the node runs {program} with transfer protocol {found}, this program speaks {SPOKEN}: upgrade the older of the two"
)]
pub struct NoCommonVersion {
    /// Its program.
    pub program: String,
    /// What it answered.
    pub found: u16,
}

/// A node that was reached: its program, and the version of the conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Its program's name and version, for people.
    pub program: String,
    /// The version that both sides use from now on.
    pub protocol: u16,
}

impl Greeting {
    /// Of a node's `Hello`.
    pub fn of_hello(protocol: u16, program: &str) -> Result<Self, NoCommonVersion> {
        let (name, _) = Versions::of_hello(protocol, program);
        let program = name.to_owned();
        if SPOKEN.contains(protocol) {
            Ok(Self { program, protocol })
        } else {
            Err(NoCommonVersion { program, found: protocol })
        }
    }
}

/// What not every version can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Another controller takes over.
    Handover,
    /// A node gets another program.
    Upgrade,
}

impl Feature {
    /// The first version that has it.
    #[must_use]
    pub const fn since(self) -> u16 {
        match self {
            Self::Handover | Self::Upgrade => 2,
        }
    }

    /// What people call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Handover => "`cluster handover`",
            Self::Upgrade => "`cluster upgrade`",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn range(lowest: u16, highest: u16) -> Versions {
        Versions { lowest, highest }
    }

    #[test]
    fn the_highest_common_version_is_used() {
        for (ours, theirs, common) in [
            (range(1, 1), range(1, 2), Some(1)),
            (range(1, 2), range(1, 2), Some(2)),
            (range(1, 3), range(2, 5), Some(3)),
            (range(1, 2), range(3, 4), None),
            (range(3, 4), range(1, 2), None),
        ] {
            assert_eq!(ours.common(theirs), common, "{ours} and {theirs}");
        }
    }

    #[test]
    fn a_range_is_read_from_behind_the_name_and_nothing_else_is_one() {
        let check = |text: &str, name: &str, expected: Versions| {
            assert_eq!(Versions::of_hello(1, text), (name, expected), "{text}");
        };
        check("shardpack 0.2.0 (transfer 1-2)", "shardpack 0.2.0", range(1, 2));
        for odd in ["shardpack 0.1.0", "", "x (transfer 2-1)", "x (transfer 1-2", "x (transfer 1)"]
        {
            check(odd, odd, range(1, 1));
        }
        assert_eq!(range(1, 2).named("shardpack 0.2.0"), "shardpack 0.2.0 (transfer 1-2)");
    }

    #[test]
    fn a_side_without_a_common_version_is_told_who_is_older() {
        let refusal = |protocol, program| range(2, 3).answer(protocol, program).unwrap_err();
        let later = refusal(4, "shardpack 9.0.0 (transfer 4-5)");
        assert_eq!(
            later.to_string(),
            "shardpack 9.0.0 speaks transfer protocol 4 to 5, this node 2 to 3: upgrade this node"
        );
        assert_eq!(
            refusal(1, "shardpack 0.1.0").to_string(),
            "shardpack 0.1.0 speaks transfer protocol 1, this node 2 to 3: upgrade the caller"
        );
        assert_eq!(later.code, FailureCode::Version);
    }
}
