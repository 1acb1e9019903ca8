//! Why running requests must end before they are done.

use super::error::{ApiError, ErrorKind};

/// Whether running requests must end, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Closing {
    /// They go on.
    #[default]
    No,
    /// The server is shutting down.
    Shutdown,
    /// Their model is being unloaded.
    Unload,
}

impl Closing {
    /// The error of a request that ends for it.
    pub(super) fn error(self) -> ApiError {
        match self {
            Self::Unload => unloading(),
            Self::No | Self::Shutdown => draining(),
        }
    }
}

/// The error for new requests while draining and for running ones when it ends.
pub(super) fn draining() -> ApiError {
    ApiError::new(ErrorKind::Unavailable, "the server is shutting down").with_code("draining")
}

/// The error for requests of a model that is being unloaded.
fn unloading() -> ApiError {
    let message = "the model is being unloaded: ask for it again, or for another one";
    ApiError::new(ErrorKind::Unavailable, message).with_code("model_unloading")
}
