//! Why a node did not do what was requested.

/// Why a node did not do as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The kind, for programs.
    pub code: FailureCode,
    /// The sentence, for people.
    pub message: String,
}

/// The kind of a [`Failure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCode {
    /// The two sides speak different versions.
    Version,
    /// Bytes that are no message.
    Malformed,
    /// A message that does not fit here.
    Unexpected,
    /// An offer that contradicts itself or is not allowed.
    Refused,
    /// The disk is too small.
    NoSpace,
    /// Another connection is filling the same package.
    Busy,
    /// The disk failed.
    Storage,
    /// Commit before every chunk was stored.
    Incomplete,
    /// Stored chunks did not survive verification.
    Damaged,
    /// No such package here.
    Unknown,
    /// The rank's engine did not start.
    NotStarted,
    /// The node does not know the operation.
    NoOperation,
    /// The operation failed.
    NotOperated,
    /// Another controller has taken over.
    Replaced,
    /// A code of a later version.
    Other(u16),
}

const CODES: &[(u16, FailureCode)] = &[
    (1, FailureCode::Version),
    (2, FailureCode::Malformed),
    (3, FailureCode::Unexpected),
    (4, FailureCode::Refused),
    (5, FailureCode::NoSpace),
    (6, FailureCode::Busy),
    (7, FailureCode::Storage),
    (8, FailureCode::Incomplete),
    (9, FailureCode::Damaged),
    (10, FailureCode::Unknown),
    (11, FailureCode::NotStarted),
    (12, FailureCode::NoOperation),
    (13, FailureCode::NotOperated),
    (14, FailureCode::Replaced),
];

impl FailureCode {
    pub(super) fn from_number(number: u16) -> Self {
        CODES.iter().find(|(code, _)| *code == number).map_or(Self::Other(number), |(_, c)| *c)
    }

    pub(super) fn number(self) -> u16 {
        match self {
            Self::Other(number) => number,
            known => CODES.iter().find(|(_, code)| *code == known).map_or(0, |(number, _)| *number),
        }
    }
}
