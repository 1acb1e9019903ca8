//! Why a sandbox gives no answer, in words for the client of a server and for who converts a model.

use std::{fmt, io, time::Duration};

/// What a sandbox was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Template and tokenizer were opened, or tried on conversations.
    Opening,
    /// A prompt was made.
    Prompt,
}

impl Work {
    const fn advice(self) -> &'static str {
        match self {
            Self::Opening => "look at the two files, or use another package of the model",
            Self::Prompt => {
                "send a shorter prompt, or use another package of the model if short ones fail too"
            }
        }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Opening => "when it was opened",
            Self::Prompt => "on this request",
        })
    }
}

/// How a sandbox ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// Its memory is limited.
    #[error("ran out of memory")]
    Memory,
    /// From outside: by the system, which ends who has most memory where it runs out, or by somebody.
    #[error("was killed (as the system does where memory runs out)")]
    Killed,
    /// A length that no memory holds, such as a text repeated too often.
    #[error("asked for more memory at once than a program can have")]
    Capacity,
    /// Its stack is limited.
    #[error("overflowed its stack")]
    Stack,
    /// Its time is limited.
    #[error("took over {} s", .0.as_secs())]
    Time(Duration),
    /// It may do nothing but compute.
    #[error("made a system call that it may not make")]
    SystemCall,
    /// It said what the protocol does not have.
    #[error("answered out of turn: {0}")]
    Protocol(String),
    /// Otherwise.
    #[error("ended: {0}")]
    Ended(String),
}

impl Cause {
    /// Whether the request took more than it may, of time or memory.
    #[must_use]
    pub const fn is_expense(&self) -> bool {
        matches!(self, Self::Memory | Self::Killed | Self::Capacity | Self::Time(_))
    }
}

/// A sandbox gives no answer.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The system does not start or confine it.
    #[error("the process for chat template and tokenizer cannot be started")]
    Start(#[source] io::Error),
    /// It ended; it is started again by itself.
    #[error("the model's chat template or tokenizer {cause} {work}: {}", .work.advice())]
    Died {
        /// What it was doing.
        work: Work,
        /// How it ended.
        cause: Cause,
    },
    /// It has ended too often, and is not started again for a moment.
    #[error(
        "the model's chat template or tokenizer {cause} several times in a row: it is started \
         again in {} s", .wait.as_secs().max(1)
    )]
    Resting {
        /// How it ended last.
        cause: Cause,
        /// Until it is started again.
        wait: Duration,
    },
    /// Every process is busy with other requests.
    #[error("the processes for the model's chat template were busy for {} s: try again", .0.as_secs())]
    Busy(Duration),
}

impl SandboxError {
    /// Whether the same request may succeed a little later, and after how long.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Resting { wait, .. } => Some(*wait),
            Self::Busy(_) => Some(Duration::from_secs(1)),
            Self::Start(_) | Self::Died { .. } => None,
        }
    }

    /// Whether it took more than it may.
    #[must_use]
    pub const fn is_expense(&self) -> bool {
        matches!(self, Self::Died { cause, .. } if cause.is_expense())
    }
}
